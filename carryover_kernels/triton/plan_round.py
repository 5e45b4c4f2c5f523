"""``plan_round``: one program a request, and one more for the rows that no request owns."""

import triton
import triton.language as tl


@triton.jit
def plan_round_kernel(
    row_cache_slot_ptr, row_carry_slot_ptr, row_position_ptr, block_start_ptr, carry_lens_ptr, carry_positions_ptr,

    num_rejected_ptr, positions_ptr,

    query_start_loc_ptr, slot_mapping_ptr, carry_slot_ids_ptr,

    requests, rows, slots, carry_capacity,

    HAS_CARRY_POSITIONS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Grid (R + 1). Program r < R owns rows query_start_loc[r] .. query_start_loc[r + 1] - 1, program R all the others.
    r = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    nothing = tl.full((BLOCK,), -1, tl.int64)
    if r == requests:
        head = tl.minimum(tl.maximum(tl.load(query_start_loc_ptr), 0), rows)
        tail = tl.minimum(tl.maximum(tl.load(query_start_loc_ptr + requests), head), rows)
        for begin in range(0, rows, BLOCK):
            row = begin + lane
            unowned = (row < head) | ((row >= tail) & (row < rows))
            tl.store(row_cache_slot_ptr + row, nothing, mask=unowned)
            tl.store(row_carry_slot_ptr + row, nothing, mask=unowned)
            tl.store(row_position_ptr + row, tl.zeros((BLOCK,), tl.int64), mask=unowned)
    else:
        first = tl.minimum(tl.maximum(tl.load(query_start_loc_ptr + r), 0), rows)
        last = tl.minimum(tl.maximum(tl.load(query_start_loc_ptr + r + 1), first), rows)
        committed_end = last - tl.minimum(tl.maximum(tl.load(num_rejected_ptr + r), 0), last - first)
        own = tl.load(carry_slot_ids_ptr + r)
        carries = (own >= 0) & (own < slots)
        carried = tl.where(carries, tl.minimum(last - committed_end, carry_capacity), 0)
        base = own.to(tl.int64) * carry_capacity
        for begin in range(first, last, BLOCK):
            row = begin + lane
            mine = row < last
            slot = tl.load(slot_mapping_ptr + row, mask=mine, other=-1)
            position = tl.load(positions_ptr + row, mask=mine, other=0)
            is_committed = mine & (row < committed_end) & (slot >= 0)
            j = row - committed_end
            is_carried = mine & (j >= 0) & (j < carried)
            tl.store(row_cache_slot_ptr + row, tl.where(is_committed, slot, -1), mask=mine)
            tl.store(row_carry_slot_ptr + row, tl.where(is_carried, base + j, -1), mask=mine)
            tl.store(row_position_ptr + row, tl.where(is_committed | is_carried, position, 0), mask=mine)
            if HAS_CARRY_POSITIONS:
                tl.store(carry_positions_ptr + base + j, position, mask=is_carried)
        before = tl.load(positions_ptr + committed_end - 1, mask=committed_end > first, other=-1)
        at_first = tl.load(positions_ptr + first, mask=last > first, other=0)
        tl.store(block_start_ptr + r, tl.where(committed_end > first, before + 1, at_first))
        tl.store(carry_lens_ptr + own, carried, mask=carries)


def plan_round_triton(
    row_cache_slot, row_carry_slot, row_position, block_start,
    query_start_loc, num_rejected, positions, slot_mapping, carry_slot_ids, carry_lens, carry_capacity, carry_positions,
):  # fmt: skip
    requests = num_rejected.shape[0]
    plan_round_kernel[(requests + 1,)](
        row_cache_slot, row_carry_slot, row_position, block_start, carry_lens, carry_positions, num_rejected, positions, query_start_loc,
        slot_mapping, carry_slot_ids, requests, positions.shape[0], carry_lens.shape[0], carry_capacity, carry_positions is not None, 256,
    )  # fmt: skip
