"""``qk_norm_rope``: the block's own queries and keys, normed and rotated."""

import torch

from ._check import ACTIVATIONS, FLOAT32, INT64, Checker, Values
from ._define import call, define

SCHEMA = (
    "(Tensor qkv, Tensor positions, Tensor rope_table, Tensor? q_norm_weight, Tensor? k_norm_weight, int num_q_heads, "
    "int num_kv_heads, float eps=1e-06, bool neox=True, bool share_kv=False, bool v_norm=False, bool rope_parity=False) "
    "-> (Tensor q, Tensor k, Tensor v)"
)


def _head_dim(qkv, num_q_heads, num_kv_heads, share_kv) -> int:
    return qkv.shape[1] // (num_q_heads + (1 if share_kv else 2) * num_kv_heads)


def _check(qkv, positions, rope_table, q_norm_weight, k_norm_weight, num_q_heads, num_kv_heads, eps, share_kv):
    check = Checker("qk_norm_rope")
    check.tensor("qkv", qkv, "M width", ACTIVATIONS, last_contiguous=True)
    check.tensor("positions", positions, "M", INT64, contiguous=True)
    check.tensor("rope_table", rope_table, "max_position rotary_dim", FLOAT32, contiguous=True)
    check.at_least("num_q_heads", num_q_heads, 1)
    check.at_least("num_kv_heads", num_kv_heads, 1)
    heads = num_q_heads + (1 if share_kv else 2) * num_kv_heads
    check.require(
        qkv.shape[1] % heads == 0 and qkv.shape[1] > 0,
        f"qkv has {qkv.shape[1]} columns, must be a positive multiple of its {heads} heads",
    )
    head_dim = _head_dim(qkv, num_q_heads, num_kv_heads, share_kv)
    rotary_dim = rope_table.shape[1]
    check.require(
        rotary_dim % 2 == 0 and 0 < rotary_dim <= head_dim,
        f"rope_table has {rotary_dim} columns, must be even and at most the head dim {head_dim}",
    )
    check.sizes["D"] = head_dim
    check.optional("q_norm_weight", q_norm_weight, "D", FLOAT32, contiguous=True)
    check.optional("k_norm_weight", k_norm_weight, "D", FLOAT32, contiguous=True)
    check.finite_and_not_negative("eps", eps)


def _fake(
    qkv, positions, rope_table, q_norm_weight, k_norm_weight, num_q_heads, num_kv_heads,
    eps=1e-6, neox=True, share_kv=False, v_norm=False, rope_parity=False,
):  # fmt: skip
    _check(qkv, positions, rope_table, q_norm_weight, k_norm_weight, num_q_heads, num_kv_heads, eps, share_kv)
    rows, head_dim = qkv.shape[0], _head_dim(qkv, num_q_heads, num_kv_heads, share_kv)
    return (
        qkv.new_empty(rows, num_q_heads, head_dim),
        qkv.new_empty(rows, num_kv_heads, head_dim),
        qkv.new_empty(rows, num_kv_heads, head_dim),
    )


def _check_values(
    qkv, positions, rope_table, q_norm_weight, k_norm_weight, num_q_heads, num_kv_heads, eps, neox, share_kv, v_norm, rope_parity
):
    check = Values("qk_norm_rope")
    check.finite("qkv", qkv, where=positions >= 0)
    check.below("positions", positions, rope_table.shape[0], "rows of rope_table")
    check.finite("rope_table", rope_table)
    for name, weight in (("q_norm_weight", q_norm_weight), ("k_norm_weight", k_norm_weight)):
        if weight is not None:
            check.finite(name, weight)


_OP = define("qk_norm_rope", SCHEMA, _fake, _check_values)


def qk_norm_rope(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    rope_table: torch.Tensor,
    q_norm_weight: torch.Tensor | None,
    k_norm_weight: torch.Tensor | None,
    num_q_heads: int,
    num_kv_heads: int,
    eps: float = 1e-6,
    neox: bool = True,
    share_kv: bool = False,
    v_norm: bool = False,
    rope_parity: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norm each head of q and k by its RMS, then rotate; v passes, or is normed without a weight (Qwen3, Gemma 4).

    k = RoPE(RMSNorm(raw k)), v = raw v. With ``share_kv`` the raw k columns are also v's source (Gemma 4's ``attention_k_eq_v``).

    Args:
        qkv: [M, (Hq + 2 Hkv) D] f32|bf16|f16, rows of any stride, columns [q | k | v]; with share_kv [M, (Hq + Hkv) D], [q | k]. M = R * B.
            Biases are in it already.
        positions: [M] i64. A row whose position is outside the table (negative: padding) gives zeros.
        rope_table: [max_position, rotary_dim] f32, [cos | sin] of rotary_dim / 2 frequencies each; rotary_dim <= D is even. The head's
            first rotary_dim elements rotate, the others pass. A proportional table has all D columns, cos 1 and sin 0 where nothing turns.
        q_norm_weight, k_norm_weight: [D] f32, or None = no norm on that one.
        num_q_heads, num_kv_heads: Hq and Hkv.
        eps: added to the mean square inside the root.
        neox: pairs are (j, j + rotary_dim / 2); False: interleaved, (2j, 2j + 1). The drafter's own layout, never the target's.
        share_kv: v comes from the raw k columns.
        v_norm: v is divided by its RMS.
        rope_parity: round as Transformers does: norm to the activation dtype, times the weight in that dtype, cos and sin in it, each
            product and sum rounded. Off: float32 throughout and one rounding at the end.

    Returns:
        q [M, Hq, D], k [M, Hkv, D], v [M, Hkv, D] in qkv's dtype, contiguous.

    Raises:
        ValueError, TypeError: an argument of the wrong shape, dtype, device or layout, named in one sentence.

    Example:
        >>> import torch, carryover_kernels as ck
        >>> q, k, v = ck.qk_norm_rope(torch.ones(3, 4 * 8), torch.arange(3), torch.ones(16, 8), None, torch.ones(8), 2, 1)
        >>> q.shape, k.shape, v.shape
        (torch.Size([3, 2, 8]), torch.Size([3, 1, 8]), torch.Size([3, 1, 8]))
    """
    return call(
        _OP, qkv, positions, rope_table, q_norm_weight, k_norm_weight, num_q_heads, num_kv_heads,
        eps, neox, share_kv, v_norm, rope_parity,
    )  # fmt: skip
