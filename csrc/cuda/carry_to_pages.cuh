// carry_to_pages: a thread for every row, every block slot and every request; each works out its request's room for itself, which is a
// walk of the few pages behind the committed tokens.
#pragma once

#include "rows.cuh"

namespace carryover_kernels {

struct CarryToPagesParams {
  int64_t *row_slot, *block_slot;
  int32_t* lengths;
  const int64_t *row_cache_slot, *row_carry_slot;
  const int32_t *query_start_loc, *block_table, *seq_lens, *slot_capacity;
  int64_t stride_table;
  int64_t rows, requests, columns, page_size, block_rows;
};

struct Places {
  const int32_t* table;
  int64_t committed, carried, block;  // committed -1: padding
};

CK_DEVICE Places places_of(const CarryToPagesParams& p, int64_t r) {
  Places places{p.block_table + r * p.stride_table, p.seq_lens[r], 0, 0};
  if (places.committed < 0) return places;
  const Rows own = rows_of(p.query_start_loc, r, p.rows);
  for (int64_t row = own.first; row < own.last; ++row) places.carried += p.row_carry_slot[row] >= 0;
  int64_t end = p.columns * p.page_size;
  if (p.slot_capacity && p.slot_capacity[r] < end) end = p.slot_capacity[r];
  const int64_t wanted = places.committed + places.carried + p.block_rows;
  if (wanted < end) end = wanted;
  int64_t index = places.committed;  // up to the first page that the request does not have
  while (index < end && places.table[index / p.page_size] >= 0) index = (index / p.page_size + 1) * p.page_size;
  if (index > end) index = end;
  const int64_t room = index > places.committed ? index - places.committed : 0;
  places.block = room < p.block_rows ? room : p.block_rows;
  if (places.carried > room - places.block) places.carried = room - places.block;
  return places;
}

CK_DEVICE int64_t slot_at(const CarryToPagesParams& p, const Places& places, int64_t index) {
  return static_cast<int64_t>(places.table[index / p.page_size]) * p.page_size + index % p.page_size;
}

CK_KERNEL void CK_BOUNDS(128, 1) carry_to_pages_kernel(CarryToPagesParams p) {
  int64_t i = thread_index();
  if (i < p.rows) {
    int64_t slot = p.row_cache_slot[i];
    const int64_t r = p.row_carry_slot[i] >= 0 ? request_of(p.query_start_loc, p.requests, i, p.rows) : -1;
    if (r >= 0 && p.seq_lens[r] >= 0) {
      const Places places = places_of(p, r);
      int64_t before = 0;
      for (int64_t row = rows_of(p.query_start_loc, r, p.rows).first; row < i; ++row) before += p.row_carry_slot[row] >= 0;
      if (before < places.carried) slot = slot_at(p, places, places.committed + before);
    }
    p.row_slot[i] = slot;
    return;
  }
  i -= p.rows;
  if (i < p.requests * p.block_rows) {
    const Places places = places_of(p, i / p.block_rows);
    const int64_t b = i % p.block_rows;
    p.block_slot[i] = b < places.block ? slot_at(p, places, places.committed + places.carried + b) : -1;
    return;
  }
  i -= p.requests * p.block_rows;
  if (i < p.requests) {
    const Places places = places_of(p, i);
    p.lengths[i] = places.committed < 0 ? 0 : static_cast<int32_t>(places.committed + places.carried + places.block);
  }
}

}  // namespace carryover_kernels
