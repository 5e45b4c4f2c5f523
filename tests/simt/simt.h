// A GPU's threads on the CPU, for tests: what device code of csrc/cuda may call, by CUDA's own names where there is one.
// The threads of a block are fibers that one core runs in turn; the blocks of a grid follow each other in no promised order.
// What it is stricter in than a GPU: shared memory starts as NaN, cp.async delivers nothing before its wait, a collective that not
// all named lanes reach or a barrier that not all threads reach is an error, and so is an address without the alignment it must have.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <functional>

namespace simt {

struct Dim {
  unsigned x = 1, y = 1, z = 1;
};

struct Place {
  Dim thread, block, block_dim, grid;
};

extern Place* here;  // of the fiber that runs

// Runs `body` once for every thread of every block. Throws std::runtime_error where the block deadlocks or a rule above is broken.
void launch(Dim grid, unsigned threads, size_t shared_bytes, const std::function<void()>& body);

void* shared_memory();
void sync_threads();
void sync_warp(unsigned mask);
[[noreturn]] void fail(const char* sentence);

// Every lane of `mask` hands in `bytes` (at most 64); all[lane] of the others is then readable in `all`, 32 slots of `bytes`.
void exchange(unsigned mask, const void* mine, size_t bytes, void* all);

void copy_async(void* to, const void* from, int bytes);  // 16 bytes, of which those after `bytes` become 0
void copy_commit();
void copy_wait(int groups_left);

inline unsigned lane() { return here->thread.x % 32; }

template <class T>
T shuffle(unsigned mask, T value, unsigned source) {
  T all[32];
  exchange(mask, &value, sizeof(T), all);
  return source < 32 && (mask >> source & 1) ? all[source] : value;
}

inline unsigned ballot(unsigned mask, bool yes) {
  uint8_t mine = yes, all[32];
  exchange(mask, &mine, 1, all);
  unsigned votes = 0;
  for (unsigned i = 0; i < 32; ++i) votes |= (mask >> i & 1) && all[i] ? 1u << i : 0u;
  return votes;
}

// d += a b by the fragment layout of mma.m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16"): a is 16 x 16, b is 16 x 8.
template <class Value>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Value value) {
  struct Fragments {
    uint32_t a[4], b[2];
  } mine, all[32];
  memcpy(mine.a, a, sizeof mine.a);
  memcpy(mine.b, b, sizeof mine.b);
  exchange(~0u, &mine, sizeof mine, all);
  const unsigned group = lane() / 4, in_group = lane() % 4;
  const auto half = [&](uint32_t word, unsigned k) { return value(static_cast<uint16_t>(word >> 16 * (k % 2))); };
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned row = group + 8 * (i / 2), column = 2 * in_group + i % 2;
    double sum = d[i];
    for (unsigned k = 0; k < 16; ++k) {
      const uint32_t left = all[row % 8 * 4 + k % 8 / 2].a[row / 8 + 2 * (k / 8)], right = all[column * 4 + k % 8 / 2].b[k / 8];
      sum += static_cast<double>(half(left, k)) * half(right, k);
    }
    d[i] = static_cast<float>(sum);
  }
}

// ldmatrix.x4: lanes 8 j .. 8 j + 7 give the addresses of the rows of matrix j (8 x 8 of 16 bits).
inline void ldmatrix_x4(uint32_t (&out)[4], const void* row, bool transposed) {
  if (reinterpret_cast<uintptr_t>(row) % 16) fail("ldmatrix: an address is not a multiple of 16");
  const void* rows[32];
  exchange(~0u, &row, sizeof row, rows);
  const unsigned group = lane() / 4, in_group = lane() % 4;
  for (unsigned j = 0; j < 4; ++j) {
    const auto at = [&](unsigned r, unsigned c) { return uint32_t{static_cast<const uint16_t*>(rows[8 * j + r])[c]}; };
    out[j] = transposed ? at(2 * in_group, group) | at(2 * in_group + 1, group) << 16
                        : at(group, 2 * in_group) | at(group, 2 * in_group + 1) << 16;
  }
}

}  // namespace simt

#define threadIdx (simt::here->thread)
#define blockIdx (simt::here->block)
#define blockDim (simt::here->block_dim)
#define gridDim (simt::here->grid)

inline void __syncthreads() { simt::sync_threads(); }
inline void __syncwarp(unsigned mask = ~0u) { simt::sync_warp(mask); }

template <class T>
T __shfl_sync(unsigned mask, T value, int source) {
  return simt::shuffle(mask, value, static_cast<unsigned>(source) % 32);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
  return simt::shuffle(mask, value, simt::lane() ^ static_cast<unsigned>(bits));
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by) {
  return simt::shuffle(mask, value, simt::lane() - by);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by) {
  return simt::shuffle(mask, value, simt::lane() + by);
}
inline unsigned __ballot_sync(unsigned mask, int yes) { return simt::ballot(mask, yes != 0); }
inline int __any_sync(unsigned mask, int yes) { return simt::ballot(mask, yes != 0) != 0; }
inline int __all_sync(unsigned mask, int yes) { return (simt::ballot(mask, yes != 0) & mask) == mask; }

inline int atomicAdd(int* at, int value) { return __atomic_fetch_add(at, value, __ATOMIC_RELAXED); }
inline unsigned atomicAdd(unsigned* at, unsigned value) { return __atomic_fetch_add(at, value, __ATOMIC_RELAXED); }
inline int atomicMax(int* at, int value) {
  int before = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (before < value && !__atomic_compare_exchange_n(at, &before, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
  return before;
}
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

using std::max;
using std::min;
