"""``carry_to_pages``: slots of [committed | carried | block] in a request's own pages."""

import torch


def carry_to_pages(row_cache_slot, row_carry_slot, query_start_loc, block_table, seq_lens, page_size, num_block_rows, slot_capacity=None):
    requests, columns = block_table.shape
    row_slot = row_cache_slot.clone()
    block_slot = torch.full((requests, num_block_rows), -1, dtype=torch.int64)
    lengths = torch.zeros(requests, dtype=torch.int32)
    starts = query_start_loc.tolist()

    for r in range(requests):
        committed = int(seq_lens[r])
        if committed < 0:
            continue
        capacity = columns * page_size if slot_capacity is None else min(int(slot_capacity[r]), columns * page_size)

        # Slots of the request after its committed tokens, up to the first page it does not have.
        free = []
        for index in range(committed, capacity):
            page = int(block_table[r, index // page_size])
            if page < 0:
                break
            free.append(page * page_size + index % page_size)

        rows = range(max(starts[r], 0), min(starts[r + 1], row_slot.shape[0]))
        carried_rows = [t for t in rows if row_carry_slot[t] >= 0]
        block = min(num_block_rows, len(free))
        carried = min(len(carried_rows), len(free) - block)
        for j in range(carried):
            row_slot[carried_rows[j]] = free[j]
        for b in range(block):
            block_slot[r, b] = free[carried + b]
        lengths[r] = committed + carried + block

    return row_slot, block_slot, lengths
