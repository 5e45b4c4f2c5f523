"""``plan_round``: which verify rows are committed, carried or skipped."""

import torch


def plan_round(query_start_loc, num_rejected, positions, slot_mapping, carry_slot_ids, carry_lens, carry_capacity, carry_positions=None):
    total, slots = positions.shape[0], carry_lens.shape[0]
    row_cache_slot = torch.full_like(positions, -1)
    row_carry_slot = torch.full_like(positions, -1)
    row_position = torch.zeros_like(positions)
    block_start = torch.zeros(num_rejected.shape[0], dtype=torch.int64)
    starts = query_start_loc.tolist()

    for r, (rejected, slot) in enumerate(zip(num_rejected.tolist(), carry_slot_ids.tolist())):
        rows = range(max(starts[r], 0), min(starts[r + 1], total))
        rejected = min(max(rejected, 0), len(rows))
        committed_rows, rejected_rows = rows[: len(rows) - rejected], rows[len(rows) - rejected :]

        if committed_rows:
            block_start[r] = positions[committed_rows[-1]] + 1
        elif rejected_rows:
            block_start[r] = positions[rejected_rows[0]]

        for t in committed_rows:
            if slot_mapping[t] >= 0:
                row_cache_slot[t] = slot_mapping[t]
                row_position[t] = positions[t]

        # A rejected row needs no slot in the engine's cache: engines give those rows -1.
        if 0 <= slot < slots:
            carried_rows = rejected_rows[:carry_capacity]
            carry_lens[slot] = len(carried_rows)
            for j, t in enumerate(carried_rows):
                row_carry_slot[t] = slot * carry_capacity + j
                row_position[t] = positions[t]
                if carry_positions is not None:
                    carry_positions[slot, j] = positions[t]

    return row_cache_slot, row_carry_slot, row_position, block_start
