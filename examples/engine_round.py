"""One round of carryover drafting from an engine's point of view: its own metadata in, drafter K/V and attention out.

Random weights, any CPU: python examples/engine_round.py
"""

import torch

import carryover_kernels as ck

torch.manual_seed(0)
L, H, F, HQ, HKV, D, B = 2, 64, 192, 4, 2, 16, 8  # drafter layers, hidden, taps x target hidden, heads, head dim, block rows
R, T, PAGES, PAGE, SLOTS, C = 2, 16, 12, 4, 4, B - 1  # requests, verify rows, pages, page size, request slots, carry capacity
angles = torch.arange(512.0)[:, None] * 1e4 ** (-torch.arange(0, D, 2.0) / D)
rope = torch.cat([angles.cos(), angles.sin()], dim=1)
fc, kv, mark, norm = torch.randn(H, F) / 14, torch.randn(2 * L * HKV * D, H) / 8, torch.randn(H), torch.ones(L, D)
k_cache, v_cache = ([torch.zeros(PAGES, PAGE, HKV, D) for _ in range(L)] for _ in "kv")  # the engine's pages, any layout
carry_k, carry_v = (torch.zeros(L, SLOTS, C, HKV, D) for _ in "kv")  # one row a request slot, replaced every round
carry_lens = torch.zeros(SLOTS, dtype=torch.int32)

# What the target's verify pass left: 8 rows a request at positions 8.. and 4.., of which verify_draft kept 3 and all 7 drafts.
query_start_loc = torch.tensor([0, 8, 16], dtype=torch.int32)
positions = torch.cat([torch.arange(8, 16), torch.arange(4, 12)])
block_table = torch.tensor([[3, 0, 7, 9, 11], [5, 2, 8, 10, 1]], dtype=torch.int32)
slot_mapping = block_table.repeat_interleave(8, 0)[torch.arange(T), positions // PAGE] * PAGE + positions % PAGE
drafts, best = torch.randint(100, (R, C)), torch.randint(100, (T,))
best[0:3], best[3], best[8:15] = drafts[0, :3], -1, drafts[1]
accepted, anchors, num_rejected = ck.verify_draft(drafts, query_start_loc, target_argmax=best)

request_slots = torch.tensor([2, 0], dtype=torch.int32)
plan = ck.plan_round(query_start_loc, num_rejected, positions, slot_mapping, request_slots, carry_lens, C)
*rows, block_start = plan
states = torch.randn(T, F)  # the taps of all verify rows: one pass for committed and rejected ones
ck.project_states(states, fc, kv, None, norm, mark, None, rope, *rows, k_cache, v_cache, carry_k, carry_v)

qkv = torch.randn(R * B, (HQ + 2 * HKV) * D)  # the next block's own projections, layer 0: anchor, then masks
block_positions = (block_start[:, None] + torch.arange(B)).flatten()
q, k, v = (x.view(R, B, -1, D) for x in ck.qk_norm_rope(qkv, block_positions, rope, norm[0], norm[0], HQ, HKV))
carry = (carry_k[0], carry_v[0], carry_lens, request_slots)
out, _ = ck.block_attention(q, k, v, k_cache[0], v_cache[0], block_table, block_start.int(), *carry)
print(f"accepted {accepted.tolist()}, carried {carry_lens[request_slots].tolist()}, blocks start at {block_start.tolist()}")
print(f"attention over [committed | carried | block]: {list(out.shape)}, finite: {bool(out.isfinite().all())}")
