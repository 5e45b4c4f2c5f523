#include "split_planner.h"

#include <algorithm>

namespace carryover_kernels {

namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

int64_t plan_splits(int64_t tasks, int64_t keys, int64_t workers, int64_t tile) {
  if (tasks <= 0 || keys <= 0 || workers <= 0 || tile <= 0) return 1;
  const int64_t tiles = ceil_div(keys, tile);
  const int64_t most = std::min(tiles, kMaxSplits);
  // The time of a plan is its rounds of workers times the tiles in the longest part; the merge costs about a quarter of a tile
  // a part. The smallest count wins a tie, since each part writes and reads its output once more.
  int64_t best = 1, best_cost = INT64_MAX;
  for (int64_t splits = 1; splits <= most; ++splits) {
    const int64_t rounds = ceil_div(tasks * splits, workers);
    const int64_t merge = splits > 1 ? ceil_div(tasks * splits, workers) : 0;
    const int64_t cost = 4 * rounds * ceil_div(tiles, splits) + merge;
    if (cost < best_cost) best = splits, best_cost = cost;
  }
  return best;
}

KeyRange split_keys(int64_t keys, int64_t tile, int64_t splits, int64_t part) {
  const int64_t tiles = ceil_div(std::max<int64_t>(keys, 0), tile);
  // The first `tiles % splits` parts take one tile more: no part is more than a tile longer than another.
  const int64_t each = tiles / splits, extra = tiles % splits;
  const int64_t first = part * each + std::min(part, extra);
  const int64_t last = first + each + (part < extra ? 1 : 0);
  return {std::min(first * tile, keys), std::min(last * tile, keys)};
}

}  // namespace carryover_kernels
