"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC 2011), by (seed, offset, step, stream, vocabulary id)."""

import torch

WORD = 0xFFFFFFFF
STREAM_DRAFT, STREAM_ACCEPT, STREAM_NEXT = 0, 1, 2


def philox(counter, key):
    """Ten rounds of Philox4x32. ``counter`` (4 words) and ``key`` (2 words) are ints or int64 tensors; gives 4 words.

    int64 products wrap modulo 2**64, so the mask after the shift still gives the right upper word.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            ((product1 >> 32) & WORD) ^ c1 ^ k0,
            product1 & WORD,
            ((product0 >> 32) & WORD) ^ c3 ^ k1,
            product0 & WORD,
        )
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def uniforms(seed: int, offset: int, step: int, stream: int, count: int) -> torch.Tensor:
    """``count`` uniforms strictly inside (0, 1), one a vocabulary id v: word v % 4 of counter v // 4. Float64, exact in float32."""
    key = (seed & WORD, (seed >> 32) & WORD)
    fixed = (step + (stream << 16), offset & WORD, (offset >> 32) & WORD)
    if count <= 64:  # Python's integers are quicker than small tensors
        word = torch.tensor([w for c in range((count + 3) // 4) for w in philox((c, *fixed), key)], dtype=torch.int64)
    else:
        counters = torch.arange((count + 3) // 4)
        word = torch.stack(philox((counters, *(torch.full_like(counters, f) for f in fixed)), key), dim=1).flatten()
    return ((word[:count] >> 9).double() + 0.5) * 2.0**-23


def gumbels(seed: int, offset: int, step: int, stream: int, count: int) -> torch.Tensor:
    """``count`` standard Gumbel numbers: the argmax of logits + gumbels is a sample of softmax(logits)."""
    return -torch.log(-torch.log(uniforms(seed, offset, step, stream, count)))
