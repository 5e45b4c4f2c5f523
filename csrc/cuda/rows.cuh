// Which rows of a packed batch a request owns.
#pragma once

#include "ptx.cuh"

namespace carryover_kernels {

struct Rows {
  int64_t first, last;
};

CK_DEVICE Rows rows_of(const int32_t* query_start_loc, int64_t r, int64_t rows) {
  const int64_t a = query_start_loc[r], b = query_start_loc[r + 1];
  const int64_t first = a < 0 ? 0 : (a > rows ? rows : a);
  return {first, b < first ? first : (b > rows ? rows : b)};
}

// -1 for a row of no request. Rounds have few requests: a walk costs less than the launch that would prepare a search.
CK_DEVICE int64_t request_of(const int32_t* query_start_loc, int64_t requests, int64_t row, int64_t rows) {
  for (int64_t r = 0; r < requests; ++r) {
    const Rows own = rows_of(query_start_loc, r, rows);
    if (own.first <= row && row < own.last) return r;
  }
  return -1;
}

CK_DEVICE int64_t thread_index() { return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }

}  // namespace carryover_kernels
