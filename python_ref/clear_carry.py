"""``clear_carry``: forgets what requests carried."""


def clear_carry(carry_slot_ids, carry_lens):
    for slot in carry_slot_ids.tolist():
        if 0 <= slot < carry_lens.shape[0]:
            carry_lens[slot] = 0
