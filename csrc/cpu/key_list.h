// One request's keys in the order in which parts walk them: [committed that any row sees | carried | block].
#pragma once

#include "../common/segments.h"
#include "kernels.h"

namespace carryover_kernels {

struct KeyList {
  int64_t committed;        // n, clamped
  int64_t first_committed;  // keys before it are seen by nobody and are not in the list
  int64_t seen_committed, carried, block, total;
  int64_t carry_slot, start;
};

static inline KeyList key_list(const AttentionArgs& args, int64_t request) {
  KeyList keys = {};
  const int64_t length = args.seq_lens[request];
  if (length < 0) return keys;  // padding
  keys.committed = clamp_length(length, args.table_width * args.page_size);
  keys.first_committed = first_committed(keys.committed, args.window_left);
  keys.seen_committed = keys.committed - keys.first_committed;
  keys.start = args.block_start ? args.block_start[request] : length;
  keys.carry_slot = -1;
  if (args.carry_k) {
    const int64_t slot = args.carry_slot_ids[request];
    if (slot >= 0 && slot < args.carry_slots) {
      keys.carry_slot = slot;
      keys.carried = clamp_length(args.carry_lens[slot], args.carry_capacity);
    }
  }
  keys.block = args.key_rows;
  keys.total = keys.seen_committed + keys.carried + keys.block;
  return keys;
}

}  // namespace carryover_kernels
