// Products of bf16 tiles in AMX registers: C (+)= A B with A as rows of k, B as rows of k pairs.
#pragma once

#include "tile.h"

#if defined(__AMX_BF16__)

namespace carryover_kernels {
namespace {

// GCC's tile intrinsics do not tell the compiler that they read and write memory: without this it moves or drops plain stores.
static inline void amx_fence() { asm volatile("" : : : "memory"); }

// All eight registers hold 16 rows of 64 bytes; kernels pad instead of reshaping them.
static inline void amx_configure() {
  struct alignas(64) {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } config = {};
  config.palette = 1;
  for (int i = 0; i < 8; ++i) config.bytes[i] = 64, config.rows[i] = 16;
  asm volatile("" : : "r"(&config) : "memory");  // its fields too
  _tile_loadconfig(&config);
}

// Steps of 32 k; strides and steps in bytes.
struct AmxOperand {
  const char* at[2];
  int64_t stride[2], step;
};
struct AmxResult {
  float* at[2][2];  // [A tile][B tile]
  int64_t stride;
};

// One or two tiles of A times one or two of B. `start`: C holds a sum already. `ahead`: bytes to prefetch A from, 0 = none.
template <int A, int B>
static inline void amx_block(const AmxOperand& a, const AmxOperand& b, const AmxResult& c, int64_t steps, bool start, int64_t ahead) {
  amx_fence();
  if (start) {
    _tile_loadd(0, c.at[0][0], c.stride);
    if constexpr (B > 1) _tile_loadd(1, c.at[0][1], c.stride);
    if constexpr (A > 1) _tile_loadd(2, c.at[1][0], c.stride);
    if constexpr (A > 1 && B > 1) _tile_loadd(3, c.at[1][1], c.stride);
  } else {
    _tile_zero(0);
    if constexpr (B > 1) _tile_zero(1);
    if constexpr (A > 1) _tile_zero(2);
    if constexpr (A > 1 && B > 1) _tile_zero(3);
  }
  const char *a0 = a.at[0], *a1 = a.at[1], *b0 = b.at[0], *b1 = b.at[1];
  for (int64_t step = 0; step < steps; ++step) {
    if (ahead) {
      // The rows of A are as many streams; the hardware follows them only within a 4 KB page.
      for (int row = 0; row < 16; ++row) {
        _mm_prefetch(a0 + row * a.stride[0] + ahead, _MM_HINT_T0);
        if constexpr (A > 1) _mm_prefetch(a1 + row * a.stride[1] + ahead, _MM_HINT_T0);
      }
    }
    _tile_loadd(6, b0, b.stride[0]);
    _tile_loadd(4, a0, a.stride[0]);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (B > 1) {
      _tile_loadd(7, b1, b.stride[1]);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (A > 1) {
      _tile_loadd(5, a1, a.stride[1]);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (B > 1) _tile_dpbf16ps(3, 5, 7);
    }
    a0 += a.step, a1 += a.step, b0 += b.step, b1 += b.step;
  }
  _tile_stored(0, c.at[0][0], c.stride);
  if constexpr (B > 1) _tile_stored(1, c.at[0][1], c.stride);
  if constexpr (A > 1) _tile_stored(2, c.at[1][0], c.stride);
  if constexpr (A > 1 && B > 1) _tile_stored(3, c.at[1][1], c.stride);
  amx_fence();
}

// One tile of A against up to four of B that lie b_tile bytes apart, C's tiles c_tile floats apart, from zero: A's rows may lie far apart
// in memory (keys of one head), so each is read once.
template <int B>
static inline void amx_row(
    const char* a, int64_t a_stride, const char* b, int64_t b_tile, float* c, int64_t c_tile, int64_t steps) {
  amx_fence();
  _tile_zero(0);
  if constexpr (B > 1) _tile_zero(1);
  if constexpr (B > 2) _tile_zero(2);
  if constexpr (B > 3) _tile_zero(3);
  for (int64_t step = 0; step < steps; ++step, a += 64, b += 1024) {
    _tile_loadd(4, a, a_stride);
    _tile_loadd(5, b, 64);
    if constexpr (B > 1) _tile_loadd(6, b + b_tile, 64);
    if constexpr (B > 2) _tile_loadd(7, b + 2 * b_tile, 64);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (B > 3) _tile_loadd(5, b + 3 * b_tile, 64);
    if constexpr (B > 1) _tile_dpbf16ps(1, 4, 6);
    if constexpr (B > 2) _tile_dpbf16ps(2, 4, 7);
    if constexpr (B > 3) _tile_dpbf16ps(3, 4, 5);
  }
  _tile_stored(0, c, 64);
  if constexpr (B > 1) _tile_stored(1, c + c_tile, 64);
  if constexpr (B > 2) _tile_stored(2, c + 2 * c_tile, 64);
  if constexpr (B > 3) _tile_stored(3, c + 3 * c_tile, 64);
  amx_fence();
}

static inline void amx_product(
    const AmxOperand& a, int a_tiles, const AmxOperand& b, int b_tiles, const AmxResult& c, int64_t steps, bool start, int64_t ahead = 0) {
  if (a_tiles == 2) {
    b_tiles == 2 ? amx_block<2, 2>(a, b, c, steps, start, ahead) : amx_block<2, 1>(a, b, c, steps, start, ahead);
  } else {
    b_tiles == 2 ? amx_block<1, 2>(a, b, c, steps, start, ahead) : amx_block<1, 1>(a, b, c, steps, start, ahead);
  }
}

}  // namespace
}  // namespace carryover_kernels

#endif
