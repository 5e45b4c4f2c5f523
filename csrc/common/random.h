// Counter-based random numbers, Philox4x32-10 (Salmon et al., SC 2011), by (seed, offset, step, stream, vocabulary id).
// The same draw on every backend: python_ref/random.py is the definition, docs/numerics.md the layout.
#pragma once

#include "scalar.h"

#if !defined(__CUDACC__)
#include <math.h>
#endif

namespace carryover_kernels {

constexpr int kStreamDraft = 0, kStreamAccept = 1, kStreamNext = 2;

struct RandomWords {
  uint32_t word[4];
};

CK_HD RandomWords philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = 0xD2511F53ull * c0, product1 = 0xCD9E8D57ull * c2;
    const uint32_t n0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0, n2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(product1);
    c3 = static_cast<uint32_t>(product0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// The four words of vocabulary ids 4 * quad .. 4 * quad + 3.
CK_HD RandomWords random_words(int64_t seed, int64_t offset, int step, int stream, uint32_t quad) {
  const uint64_t key = static_cast<uint64_t>(seed), round = static_cast<uint64_t>(offset);
  return philox(
      quad, static_cast<uint32_t>(step) + (static_cast<uint32_t>(stream) << 16), static_cast<uint32_t>(round),
      static_cast<uint32_t>(round >> 32), static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
}

// Strictly inside (0, 1), exact in float.
CK_HD float random_uniform(uint32_t word) { return (static_cast<float>(word >> 9) + 0.5f) * 1.1920928955078125e-07f; }

CK_HD float random_gumbel(uint32_t word) { return -logf(-logf(random_uniform(word))); }

}  // namespace carryover_kernels
