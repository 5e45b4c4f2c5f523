"""``carry_to_pages``: one program a request; rows keep their committed slots by one copy before."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["columns"])  # 1 would become a Python int, which has no .to
def carry_to_pages_kernel(
    row_slot_ptr, block_slot_ptr, lengths_ptr,

    row_carry_slot_ptr,

    query_start_loc_ptr, block_table_ptr, seq_lens_ptr, slot_capacity_ptr,

    rows, columns, page_size, num_block_rows, stride_table,

    HAS_CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Grid (R). A program finds its request's room, then places carried rows, then block rows.
    r = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    committed = tl.load(seq_lens_ptr + r)
    table_ptr = block_table_ptr + r.to(tl.int64) * stride_table
    live = committed >= 0
    capacity = columns.to(tl.int64) * page_size
    if HAS_CAPACITY:
        capacity = tl.minimum(capacity, tl.load(slot_capacity_ptr + r).to(tl.int64))
    # The room ends at the first page the request does not have, from the page of token `committed` on.
    end = tl.where(live, capacity, 0)
    first_page = tl.maximum(committed, 0) // page_size
    for begin in range(first_page, columns, BLOCK):
        page = begin + lane
        id = tl.load(table_ptr + page, mask=page < columns, other=0)
        gap = tl.where((page < columns) & (id < 0), tl.maximum(page.to(tl.int64) * page_size, committed), 9223372036854775807)
        end = tl.minimum(end, tl.min(gap))
    room = tl.where(live, tl.maximum(end - committed, 0), 0)
    block = tl.minimum(room, num_block_rows)

    first = tl.minimum(tl.maximum(tl.load(query_start_loc_ptr + r), 0), rows)
    last = tl.minimum(tl.maximum(tl.load(query_start_loc_ptr + r + 1), first), rows)
    placed = tl.zeros((), tl.int64)
    for begin in range(first, last, BLOCK):
        row = begin + lane
        carried = tl.load(row_carry_slot_ptr + row, mask=row < last, other=-1) >= 0
        j = placed + tl.cumsum(carried.to(tl.int64)) - 1
        fits = carried & (j < room - block)
        token = committed + j
        page = tl.load(table_ptr + token // page_size, mask=fits, other=0).to(tl.int64)
        tl.store(row_slot_ptr + row, page * page_size + token % page_size, mask=fits)
        placed += tl.sum(carried.to(tl.int64))
    placed = tl.minimum(placed, room - block)
    for begin in range(0, num_block_rows, BLOCK):
        b = begin + lane
        token = committed + placed + b
        fits = b < block
        page = tl.load(table_ptr + token // page_size, mask=fits, other=0).to(tl.int64)
        slot = tl.where(fits, page * page_size + token % page_size, -1)
        tl.store(block_slot_ptr + r.to(tl.int64) * num_block_rows + b, slot, mask=b < num_block_rows)
    tl.store(lengths_ptr + r, tl.where(live, committed + placed + block, 0).to(tl.int32))


def carry_to_pages_triton(
    row_slot, block_slot, lengths,
    row_cache_slot, row_carry_slot, query_start_loc, block_table, seq_lens, page_size, num_block_rows, slot_capacity,
):  # fmt: skip
    row_slot.copy_(row_cache_slot)
    requests = seq_lens.shape[0]
    if requests:
        carry_to_pages_kernel[(requests,)](
            row_slot, block_slot, lengths, row_carry_slot, query_start_loc, block_table, seq_lens, slot_capacity, row_cache_slot.shape[0],
            block_table.shape[1], page_size, num_block_rows, block_table.stride(0), slot_capacity is not None, 128,
        )  # fmt: skip
