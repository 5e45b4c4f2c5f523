"""``clear_carry``: one lane a request."""

import triton
import triton.language as tl


@triton.jit
def clear_carry_kernel(carry_lens_ptr, carry_slot_ids_ptr, requests, slots, BLOCK: tl.constexpr):
    # Grid (ceil(R / BLOCK)).
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(carry_slot_ids_ptr + r, mask=r < requests, other=-1)
    tl.store(carry_lens_ptr + slot, tl.zeros((BLOCK,), tl.int32), mask=(slot >= 0) & (slot < slots))


def clear_carry_triton(carry_slot_ids, carry_lens):
    requests = carry_slot_ids.shape[0]
    if requests:
        clear_carry_kernel[(triton.cdiv(requests, 256),)](carry_lens, carry_slot_ids, requests, carry_lens.shape[0], 256)
