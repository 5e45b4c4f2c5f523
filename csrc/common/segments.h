// The keys of one request: [committed 0..n-1 | carried 0..m-1 | block 0..B-1], and who sees them.
// Positions here are relative to block row 0, so that 32 bits hold every distance that matters: committed key i lies at i - n,
// block row b at b, carried row j at j unless its position is given.
#pragma once

#include "scalar.h"

namespace carryover_kernels {

CK_HD int64_t clamp_length(int64_t length, int64_t capacity) { return length < 0 ? 0 : (length > capacity ? capacity : length); }

// Causal and window masks go by position, never by key index. -1 = no window on that side.
CK_HD bool key_visible(int64_t key, int64_t query, bool causal, int64_t window_left, int64_t window_right) {
  if (causal && key > query) return false;
  if (window_left >= 0 && query - key > window_left) return false;
  if (window_right >= 0 && key - query > window_right) return false;
  return true;
}

// The same rule solved for the query: block rows first..last (inclusive, within 0..rows-1) see the key; first > last: nobody.
struct RowRange {
  int first, last;
};

CK_HD RowRange rows_seeing(int64_t key, int64_t rows, bool causal, int64_t window_left, int64_t window_right) {
  int64_t first = 0, last = rows - 1;
  if (causal && key > first) first = key;
  if (window_right >= 0 && key - window_right > first) first = key - window_right;
  // Compared before it is added: window_left may be as large as an int64 holds.
  if (window_left >= 0 && key < last - window_left) last = key + window_left;
  if (first > last) return {1, 0};
  return {static_cast<int>(first), static_cast<int>(last)};
}

// First committed key that any block row sees: row 0 looks furthest back, to position -window_left.
CK_HD int64_t first_committed(int64_t committed, int64_t window_left) {
  return window_left < 0 || window_left >= committed ? 0 : committed - window_left;
}

}  // namespace carryover_kernels
