// How many parts to cut the keys of each (request, KV head) into, so that few requests still use every worker.
// Integers only; shared by the C++ doors and, through the bindings, by the Triton launchers.
#pragma once

#include <cstdint>

namespace carryover_kernels {

// tasks: independent (request, KV head, row tile) units. keys: the longest key list among them. workers: cores, or SMs times
// resident blocks. tile: keys a worker reads at once. Returns 1..ceil(keys / tile), never more than kMaxSplits.
constexpr int64_t kMaxSplits = 64;
int64_t plan_splits(int64_t tasks, int64_t keys, int64_t workers, int64_t tile);

// Keys of part `part` of `splits`: [first, last), whole tiles but for the end; a part may be empty.
struct KeyRange {
  int64_t first, last;
};
KeyRange split_keys(int64_t keys, int64_t tile, int64_t splits, int64_t part);

}  // namespace carryover_kernels
