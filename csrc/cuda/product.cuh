// A tile of a product with weights: [kRows rows of x] times [columns rows of w], both with the depth as their last dimension, in float32.
// Weights are the traffic: each is read once for all rows of the tile, through a pipeline of cp.async. bf16 and f16 go through mma.sync,
// the four warps of the block taking a quarter of each stage's depth; float32 is multiplied as float32.
#pragma once

#include "elem.cuh"

namespace carryover_kernels {

constexpr int kProductThreads = 128, kColumnsAChunk = 32, kPieces = 8;  // a stage's row: 8 pieces of 16 bytes
constexpr int kPitch = 16 * kPieces + 16;                               // in bytes: rows of a matrix of ldmatrix fall into different banks

template <int kRows>
constexpr int kStages = kRows > 16 ? 4 : 8;

template <int kRows>
constexpr int kProductBytes = kStages<kRows> * (kRows + kColumnsAChunk) * kPitch;

template <class T>
struct Factors {
  const T *x, *w;
  int64_t x_stride;  // of x's rows; w's rows lie one behind another
  int64_t rows, columns, depth;
};

// Elements first .. of a row to one piece of a stage, zeros where there are none.
template <class T>
CK_DEVICE void stage_piece(char* to, const T* row, bool there, int64_t first, int64_t depth) {
  constexpr int kElements = 16 / sizeof(T);
  const int64_t left = !there || first >= depth ? 0 : depth - first < kElements ? depth - first : kElements;
  if (left > 0 && aligned(row + first)) return copy_async(to, row + first, static_cast<int>(left * sizeof(T)));
  Words words{};
  CK_UNROLL
  for (int j = 0; j < kElements; ++j) {  // by constants: a register has no index
    if (j >= left) continue;
    uint32_t bits = 0;
    memcpy(&bits, row + first + j, sizeof(T));
    words.word[j * sizeof(T) / 4] |= bits << (j * sizeof(T) % 4 * 8);
  }
  store_words(to, words);
}

template <class T, int kRows>
struct Accumulator {  // of mma
  float sum[kRows / 16][kColumnsAChunk / 8][4] = {};

  CK_METHOD void add(const char* x, const char* w, int lane, int warp) {
    uint32_t b[kColumnsAChunk / 16][4];
    CK_UNROLL
    for (int n = 0; n < kColumnsAChunk / 16; ++n)
      ldmatrix(b[n], w + (n * 16 + lane / 16 * 8 + lane % 8) * kPitch + warp * 32 + lane / 8 % 2 * 16);
    CK_UNROLL
    for (int m = 0; m < kRows / 16; ++m) {
      uint32_t a[4];
      ldmatrix(a, x + (m * 16 + lane % 16) * kPitch + warp * 32 + lane / 16 * 16);
      CK_UNROLL
      for (int n = 0; n < kColumnsAChunk / 8; ++n) {
        const uint32_t pair[2] = {b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]};
        mma(sum[m][n], a, pair, T{});
      }
    }
  }

  // The warps in turn, so that the order of the additions is always the same.
  CK_METHOD void flush(float* tile, int64_t tile_pitch, int lane, int warp) {
    for (int turn = 0; turn < kProductThreads / 32; ++turn) {
      if (warp == turn) {
        CK_UNROLL
        for (int m = 0; m < kRows / 16; ++m) {
          CK_UNROLL
          for (int n = 0; n < kColumnsAChunk / 8; ++n) {
            CK_UNROLL
            for (int i = 0; i < 4; ++i) {
              float* at = tile + (m * 16 + lane / 4 + i / 2 * 8) * tile_pitch + n * 8 + lane % 4 * 2 + i % 2;
              *at = turn ? *at + sum[m][n][i] : sum[m][n][i];
              sum[m][n][i] = 0.0f;
            }
          }
        }
      }
      __syncthreads();
    }
  }
};

template <int kRows>
struct Accumulator<float, kRows> {  // a thread: one column of every fourth row
  float sum[kRows / 4] = {};

  CK_METHOD void add(const char* x, const char* w, int lane, int warp) {
    const float* column = reinterpret_cast<const float*>(w + lane * kPitch);
    CK_UNROLL
    for (int m = 0; m < kRows / 4; ++m) {
      const float* row = reinterpret_cast<const float*>(x + (m * 4 + warp) * kPitch);
      float part = 0.0f;  // a stage's sum by itself: the error grows with depth / 32, not with depth
      for (int k = 0; k < 4 * kPieces; ++k) part += row[k] * column[k];
      sum[m] += part;
    }
  }

  CK_METHOD void flush(float* tile, int64_t tile_pitch, int lane, int warp) {
    CK_UNROLL
    for (int m = 0; m < kRows / 4; ++m) {
      tile[(m * 4 + warp) * tile_pitch + lane] = sum[m];
      sum[m] = 0.0f;
    }
    __syncthreads();
  }
};

// tile[row * tile_pitch + column], for columns up to the next multiple of 32; there for every thread when this returns.
template <class T, int kRows>
CK_DEVICE void product(const Factors<T>& f, char* stages, float* tile, int64_t tile_pitch) {
  constexpr int kDepth = 16 * kPieces / sizeof(T), kBytes = (kRows + kColumnsAChunk) * kPitch, kAhead = kStages<kRows> - 1;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int64_t steps = f.depth > 0 ? (f.depth + kDepth - 1) / kDepth : 1, total = steps * ((f.columns + kColumnsAChunk - 1) / kColumnsAChunk);
  const auto load = [&](int64_t step) {
    if (step < total) {
      const int64_t begin = step % steps * kDepth, first_column = step / steps * kColumnsAChunk;
      char* to = stages + step % kStages<kRows> * kBytes;
      for (int i = static_cast<int>(threadIdx.x); i < (kRows + kColumnsAChunk) * kPieces; i += kProductThreads) {
        const int row = i / kPieces, piece = i % kPieces;
        const int64_t first = begin + piece * (16 / static_cast<int>(sizeof(T))), column = first_column + row - kRows;
        if (row < kRows) stage_piece(to + row * kPitch + piece * 16, f.x + row * f.x_stride, row < f.rows, first, f.depth);
        else stage_piece(to + row * kPitch + piece * 16, f.w + column * f.depth, column < f.columns, first, f.depth);
      }
    }
    copy_commit();
  };
  for (int step = 0; step < kAhead; ++step) load(step);
  Accumulator<T, kRows> accumulator;
  for (int64_t step = 0; step < total; ++step) {
    copy_wait<kAhead - 1>();
    __syncthreads();  // this stage is there, and everyone is done with the one that the next load overwrites
    load(step + kAhead);
    const char* stage = stages + step % kStages<kRows> * kBytes;
    accumulator.add(stage, stage + kRows * kPitch, lane, warp);
    if ((step + 1) % steps == 0) accumulator.flush(tile + step / steps * kColumnsAChunk, tile_pitch, lane, warp);
  }
}

}  // namespace carryover_kernels
