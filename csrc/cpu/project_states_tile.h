// project_states on lanes: 16 active rows side by side, so that RMS norms, k_norm and RoPE go down columns of a product's result.
// Weights are the A operand, read in place exactly once a sweep; rows that are stored nowhere never enter a product.
#pragma once

#include "../common/rms_norm.h"
#include "../common/rope.h"
#include "amx.h"
#include "tile.h"

namespace carryover_kernels {
namespace {

constexpr int64_t kPackColumns = 512;  // of states, a unit of the pack sweep
constexpr int64_t kFcRows = 32;        // of fc_weight, a unit of the fc sweep with few lanes: two AMX tiles
constexpr int64_t kFcRowsWide = 128;   // with many: states, read once a unit, are then the larger operand
constexpr int64_t kWideTiles = 5;
constexpr int64_t kAmxColumns = 1024;  // a step of a wide product: 128 rows of weights in 256 KB, 32 lanes of states in 64 KB
constexpr int64_t kPanelRows = 12;     // weights converted to float32 at once, where there is no product of their type
constexpr int64_t kPanelColumns = 512;

static inline bool project_in_bf16(const ProjectArgs& args) {
  return kHasDot && args.type == Elem::bf16 && args.hidden % 2 == 0 && (!args.fc_weight || args.features % 2 == 0);
}

static inline int64_t project_lanes(const ProjectArgs& args) { return (args.num_active + kLanes - 1) / kLanes * kLanes; }

static inline int64_t fc_rows(const ProjectArgs& args) {
  return project_lanes(args) / kLanes < kWideTiles ? kFcRows : kFcRowsWide;
}

static ProjectSizes project_sizes(const ProjectArgs& args) {
  ProjectSizes sizes = {};
  const int64_t element = project_in_bf16(args) ? 2 : 4;
  sizes.lanes = project_lanes(args);
  const int64_t tiles = sizes.lanes / kLanes;
  sizes.packed_hidden = sizes.lanes * args.hidden * element;
  if (args.fc_weight) {
    sizes.packed_states = sizes.lanes * args.features * element;
    sizes.pack_units = tiles * ((args.features + kPackColumns - 1) / kPackColumns);
    sizes.fc_units = (args.hidden + fc_rows(args) - 1) / fc_rows(args);
  } else {
    sizes.pack_units = tiles;
  }
  sizes.kv_units = args.layers * args.kv_heads * (args.share_kv ? 1 : 2);
  return sizes;
}

static int64_t project_workspace(const ProjectArgs& args) {
  const int64_t lanes = project_lanes(args);
  int64_t floats = lanes * (args.head_dim > fc_rows(args) ? args.head_dim : fc_rows(args));  // a product's result
  floats += kPanelRows * kPanelColumns;                                               // converted weights
  const int64_t pack = kLanes * (args.hidden > kPackColumns ? args.hidden : kPackColumns);
  const int64_t store = 3 * kLanes * args.head_dim;                                   // a tile, its transpose, scaled rows
  return (floats + (pack > store ? pack : store)) * 4 + 192;
}

static inline float* take_floats(char*& at, int64_t count) {
  float* floats = reinterpret_cast<float*>(at);
  at += (count * 4 + 63) / 64 * 64;
  return floats;
}

static inline char* aligned(void* workspace) {
  char* at = static_cast<char*>(workspace);
  return at + (-reinterpret_cast<intptr_t>(at) & 63);
}

// c[tile][row][16] = sum over columns of weight[row][column] * x[tile][column][16].
static void project_product(
    const ProjectArgs& args, const char* weight, int64_t rows, int64_t columns, const void* packed, int64_t tiles, float* c, int64_t c_tile,
    float* panel) {
  const int64_t row_bytes = columns * elem_size(args.type);
  const float* x = static_cast<const float*>(packed);
  if (project_in_bf16(args)) {
    const int64_t pairs = columns / 2, x_tile = pairs * kLanes;
    int64_t done = 0;
#if defined(__AMX_BF16__)
    if (columns % 32 == 0) {
      // Few lanes: one pass over the weights, from memory. Many: blocks that stay in L2, whose results are added up.
      const bool wide = tiles >= kWideTiles;
      const int64_t step = wide ? kAmxColumns : columns;
      done = rows / kLanes * kLanes;
      for (int64_t first = 0; first < columns; first += step) {
        const int64_t steps = (columns - first < step ? columns - first : step) / 32;
        for (int64_t tile = 0; tile < tiles; tile += 2)
          for (int64_t row = 0; row < done; row += 2 * kLanes) {
            AmxOperand a = {}, b = {};
            AmxResult out = {};
            a.step = 64, b.step = 1024, out.stride = 64;
            for (int t = 0; t < 2; ++t) {
              a.at[t] = weight + (row + t * kLanes) * row_bytes + first * 2, a.stride[t] = row_bytes;
              b.at[t] = reinterpret_cast<const char*>(x + (tile + t) * x_tile + first / 2 * kLanes), b.stride[t] = 64;
              for (int half = 0; half < 2; ++half) out.at[half][t] = c + (tile + t) * c_tile + (row + half * kLanes) * kLanes;
            }
            const int a_tiles = done - row < 2 * kLanes ? 1 : 2, b_tiles = tiles - tile < 2 ? 1 : 2;
            amx_product(a, a_tiles, b, b_tiles, out, steps, first > 0, tile == 0 ? 512 : 0);
          }
      }
    }
#endif
    const auto pair = [&](int64_t row, int64_t k) { return weight + (done + row) * row_bytes + k * 4; };
    product<kHasDot>(c + done * kLanes, c_tile, tiles, rows - done, pair, x, x_tile, 0, pairs, false);
    return;
  }
  if (args.type == Elem::f32) {
    const auto element = [&](int64_t row, int64_t k) { return weight + row * row_bytes + k * 4; };
    product<false>(c, c_tile, tiles, rows, element, x, columns * kLanes, 0, columns, false);
    return;
  }
  for (int64_t row = 0; row < rows; row += kPanelRows) {
    const int64_t count = rows - row < kPanelRows ? rows - row : kPanelRows;
    for (int64_t first = 0; first < columns; first += kPanelColumns) {
      const int64_t last = columns - first < kPanelColumns ? columns : first + kPanelColumns;
      for (int64_t i = 0; i < count; ++i)
        to_floats(panel + i * kPanelColumns, weight + (row + i) * row_bytes + first * elem_size(args.type), args.type, last - first);
      const auto element = [&](int64_t i, int64_t k) { return reinterpret_cast<const char*>(panel + i * kPanelColumns + k - first); };
      product<false>(c + row * kLanes, c_tile, tiles, count, element, x, columns * kLanes, first, last, first > 0);
    }
  }
}

// 1 in the lanes of carried rows, else 0: what the mark is multiplied with.
static inline VecF carried_lanes(const ProjectArgs& args, int64_t tile) {
  float carried[kLanes] = {};
  for (int64_t lane = 0; lane < kLanes && tile * kLanes + lane < args.num_active; ++lane)
    carried[lane] = args.row_carry_slot[args.active[tile * kLanes + lane]] >= 0 ? 1.0f : 0.0f;
  return load(carried);
}

// Row pairs of bf16, or rows of float32, of one tile of hidden states.
static inline void put_hidden(const ProjectArgs& args, int64_t tile, int64_t row, VecF first, VecF second) {
  float* to = static_cast<float*>(args.packed_hidden);
  if (project_in_bf16(args)) {
#if defined(__AVX512BF16__)
    const __m512i even = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)first.p[0]));
    const __m512i odd = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)second.p[0]));
    _mm512_storeu_si512(to + (tile * args.hidden + row) / 2 * kLanes, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
#endif
  } else {
    store(to + (tile * args.hidden + row) * kLanes, first);
    if (row + 1 < args.hidden) store(to + (tile * args.hidden + row + 1) * kLanes, second);
  }
}

// Adds the mark to carried lanes of rows first_row.. of hidden states, leaves their squares, packs them for the K/V product.
static void finish_hidden(const ProjectArgs& args, int64_t tile, int64_t first_row, int64_t rows, const float* c, float* squares) {
  const VecF carried = carried_lanes(args, tile);
  VecF sum = splat(0.0f);
  for (int64_t i = 0; i < rows; i += 2) {
    VecF h[2] = {splat(0.0f), splat(0.0f)};
    for (int64_t j = 0; j < 2 && i + j < rows; ++j) {
      h[j] = load(c + (i + j) * kLanes);
      if (args.mark) h[j] = mul_add(carried, splat(args.mark[first_row + i + j]), h[j]);
      sum = mul_add(h[j], h[j], sum);
    }
    put_hidden(args, tile, first_row + i, h[0], h[1]);
  }
  store(squares + tile * kLanes, sum);
}

static void project_pack(const ProjectArgs& args, int64_t unit, void* workspace) {
  char* at = aligned(workspace);
  const int64_t tiles = project_lanes(args) / kLanes;
  const int64_t tile = unit % tiles, first = unit / tiles * kPackColumns;
  const bool bf16 = project_in_bf16(args);
  const char* rows[kLanes] = {};
  for (int64_t lane = 0; lane < kLanes && tile * kLanes + lane < args.num_active; ++lane) {
    const int64_t row = args.active[tile * kLanes + lane];
    rows[lane] = static_cast<const char*>(args.states) + row * args.states_row * elem_size(args.type);
  }
  const uint32_t* from[kLanes];
  if (args.fc_weight) {
    const int64_t columns = args.features - first < kPackColumns ? args.features - first : kPackColumns;
    float* copies = take_floats(at, kLanes * kPackColumns);
    for (int lane = 0; lane < kLanes; ++lane) {
      from[lane] = nullptr;
      if (!rows[lane]) continue;
      const char* row = rows[lane] + first * elem_size(args.type);
      from[lane] = reinterpret_cast<const uint32_t*>(row);
      if (bf16 || args.type == Elem::f32) continue;
      to_floats(copies + lane * kPackColumns, row, args.type, columns);
      from[lane] = reinterpret_cast<const uint32_t*>(copies + lane * kPackColumns);
    }
    const int64_t each = bf16 ? 2 : 1;  // elements in 32 bits
    uint32_t* to = static_cast<uint32_t*>(args.packed_states) + (tile * args.features + first) / each * kLanes;
    pack_lanes(to, kLanes, from, columns / each);
    return;
  }
  // The engine ran fc: states are hidden states before the norm. Floats go through the same lanes as fc's result would.
  float* copies = take_floats(at, kLanes * args.hidden);
  float* c = take_floats(at, kLanes * kFcRows);
  float total[kLanes] = {}, part[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    from[lane] = rows[lane] ? reinterpret_cast<const uint32_t*>(copies + lane * args.hidden) : nullptr;
    if (rows[lane]) to_floats(copies + lane * args.hidden, rows[lane], args.type, args.hidden);
  }
  for (int64_t row = 0; row < args.hidden; row += kFcRows) {
    const int64_t count = args.hidden - row < kFcRows ? args.hidden - row : kFcRows;
    pack_lanes(reinterpret_cast<uint32_t*>(c), kLanes, from, count);
    finish_hidden(args, tile, row, count, c, part - tile * kLanes);
    for (int lane = 0; lane < kLanes; ++lane) {
      total[lane] += part[lane];
      if (from[lane]) from[lane] += count;
    }
  }
  memcpy(args.partial_squares + tile * kLanes, total, sizeof total);
}

static void project_fc(const ProjectArgs& args, int64_t unit, void* workspace) {
  char* at = aligned(workspace);
  const int64_t lanes = project_lanes(args), tiles = lanes / kLanes, most = fc_rows(args), first = unit * most;
  const int64_t rows = args.hidden - first < most ? args.hidden - first : most;
  float* c = take_floats(at, lanes * most);
  float* panel = take_floats(at, kPanelRows * kPanelColumns);
  const char* weight = static_cast<const char*>(args.fc_weight) + first * args.features * elem_size(args.type);
  project_product(args, weight, rows, args.features, args.packed_states, tiles, c, most * kLanes, panel);
  float* squares = args.partial_squares + unit * lanes;
  for (int64_t tile = 0; tile < tiles; ++tile) finish_hidden(args, tile, first, rows, c + tile * most * kLanes, squares);
}

static inline float round_one(float x, Elem type) {
  return type == Elem::bf16 ? bf16_to_float(float_to_bf16(x)) : type == Elem::f16 ? f16_to_float(float_to_f16(x)) : x;
}

static inline VecF round_lanes(VecF x, Elem type) {
  if (type == Elem::f32) return x;
  if (type == Elem::bf16) {
    const VecI u = bits(x);
    return from_bits((u + splat_int(0x7fff) + (shift_right(u, 16) & splat_int(1))) & splat_int(static_cast<int32_t>(0xffff0000)));
  }
#if defined(__AVX512F__)
  x.p[0] = (NativeF)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)x.p[0], 0));
  return x;
#else
  float lanes[kLanes];
  store(lanes, x);
  for (int i = 0; i < kLanes; ++i) lanes[i] = round_one(lanes[i], type);
  return load(lanes);
#endif
}

// After the fc sweep: the rows' 1/rms, and cos and sin of their positions, laid out by lane.
static void project_norms(const ProjectArgs& args) {
  const int64_t lanes = project_lanes(args), units = args.fc_weight ? project_sizes(args).fc_units : 1;
  for (int64_t lane = 0; lane < lanes; ++lane) {
    double sum = 0.0;
    for (int64_t unit = 0; unit < units; ++unit) sum += args.partial_squares[unit * lanes + lane];
    args.inverse_rms[lane] = rms_scale(static_cast<float>(sum), args.hidden, args.norm_eps);
    const int64_t row = lane < args.num_active ? args.active[lane] : args.active[0];
    const float* table = args.rope_table + args.row_position[row] * args.rotary_dim;
    for (int64_t i = 0; i < args.rotary_dim; ++i)
      args.rotation[i * lanes + lane] = args.rope_parity ? round_one(table[i], args.type) : table[i];
  }
}

// 1/rms of each lane's column of x. Four chains: a column of a large head dim would pile up its rounding errors in one.
template <class Round>
static inline VecF rms_of_lanes(const float* x, int64_t count, float eps, Round round) {
  VecF squares[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
  for (int64_t d = 0; d < count; ++d) {
    const VecF y = round(load(x + d * kLanes));
    squares[d % 4] = mul_add(y, y, squares[d % 4]);
  }
  float lanes[kLanes];
  store(lanes, (squares[0] + squares[1]) + (squares[2] + squares[3]));
  for (int i = 0; i < kLanes; ++i) lanes[i] = rms_scale(lanes[i], count, eps);
  return load(lanes);
}

// k of one head and tile, in place: norm, weight, rotation.
static void finish_keys(const ProjectArgs& args, int64_t layer, int64_t tile, float* k) {
  const int64_t lanes = project_lanes(args), half = args.rotary_dim / 2;
  const Elem round_type = args.rope_parity ? args.type : Elem::f32;
  const auto round = [&](VecF x) { return round_lanes(x, round_type); };
  if (args.k_norm_weight) {
    const float* weight = args.k_norm_weight + layer * args.head_dim;
    const VecF scale = rms_of_lanes(k, args.head_dim, args.k_norm_eps, round);
    for (int64_t d = 0; d < args.head_dim; ++d) {
      const VecF x = round(round(load(k + d * kLanes)) * scale);
      store(k + d * kLanes, round(x * splat(round_one(weight[d], round_type))));
    }
  }
  for (int64_t j = 0; j < half; ++j) {
    const RopePair pair = rope_pair(static_cast<int>(j), static_cast<int>(half), args.neox);
    const VecF cosine = load(args.rotation + j * lanes + tile * kLanes), sine = load(args.rotation + (half + j) * lanes + tile * kLanes);
    float *first = k + pair.first * kLanes, *second = k + pair.second * kLanes;
    const VecF a = load(first), b = load(second);
    store(first, round(round(a * cosine) - round(b * sine)));
    store(second, round(round(b * cosine) + round(a * sine)));
  }
}

static void finish_values(const ProjectArgs& args, float* v) {
  if (!args.v_norm) return;
  const VecF scale = rms_of_lanes(v, args.head_dim, args.k_norm_eps, [](VecF x) { return x; });
  for (int64_t d = 0; d < args.head_dim; ++d) store(v + d * kLanes, load(v + d * kLanes) * scale);
}

// One head of k or v of 16 rows, to pages and carry slots.
static void scatter(const ProjectArgs& args, int64_t layer, int64_t head, bool is_v, int64_t tile, const float* lanes, float* rows) {
  const int64_t left = args.num_active - tile * kLanes, count = left < kLanes ? left : kLanes, dim = args.head_dim;
  unpack_lanes(rows, dim, lanes, dim, count);
  float* scaled = rows + kLanes * dim;
  const int64_t* strides = args.cache_strides + layer * 6 + (is_v ? 3 : 0);
  const float* scales = is_v ? args.v_scale : args.k_scale;
  for (int64_t lane = 0; lane < count; ++lane) {
    const int64_t index = tile * kLanes + lane, row = args.active[index];
    const float* values = rows + lane * dim;
    if (args.in_pages[index]) {
      const int64_t slot = args.row_cache_slot[row];
      const int64_t at = slot / args.page_size * strides[0] + slot % args.page_size * strides[1] + head * strides[2];
      if (scales)
        for (int64_t d = 0; d < dim; ++d) scaled[d] = values[d] / scales[layer];
      char* cache = static_cast<char*>(is_v ? args.v_cache[layer] : args.k_cache[layer]);
      from_floats(cache + at * elem_size(args.cache_type), args.cache_type, scales ? scaled : values, dim);
    }
    if (args.in_carry[index]) {
      const int64_t slot = args.row_carry_slot[row] / args.carry_capacity, place = args.row_carry_slot[row] % args.carry_capacity;
      const int64_t at = is_v ? layer * args.cv_layer + slot * args.cv_slot + place * args.cv_row + head * args.cv_head
                              : layer * args.ck_layer + slot * args.ck_slot + place * args.ck_row + head * args.ck_head;
      char* carry = static_cast<char*>(is_v ? args.carry_v : args.carry_k);
      from_floats(carry + at * elem_size(args.carry_type), args.carry_type, values, dim);
    }
  }
}

static void project_kv(const ProjectArgs& args, int64_t unit, void* workspace) {
  char* at = aligned(workspace);
  const int64_t lanes = project_lanes(args), tiles = lanes / kLanes, dim = args.head_dim;
  const int64_t layer = unit / (args.kv_heads * (args.share_kv ? 1 : 2)), inside = unit % (args.kv_heads * (args.share_kv ? 1 : 2));
  const bool is_v = inside >= args.kv_heads;
  const int64_t head = inside % args.kv_heads, first = unit * dim;
  float* c = take_floats(at, lanes * dim);
  float* panel = take_floats(at, kPanelRows * kPanelColumns);
  float* copy = take_floats(at, kLanes * dim);
  float* rows = take_floats(at, 2 * kLanes * dim);
  const char* weight = static_cast<const char*>(args.kv_weight) + first * args.hidden * elem_size(args.type);
  project_product(args, weight, dim, args.hidden, args.packed_hidden, tiles, c, dim * kLanes, panel);

  for (int64_t tile = 0; tile < tiles; ++tile) {
    float* head_lanes = c + tile * dim * kLanes;
    const VecF scale = load(args.inverse_rms + tile * kLanes), carried = carried_lanes(args, tile);
    for (int64_t d = 0; d < dim; ++d) {
      VecF x = load(head_lanes + d * kLanes) * scale;
      if (args.kv_bias) x = x + splat(args.kv_bias[first + d]);
      if (args.mark_kv) x = mul_add(carried, splat(args.mark_kv[first + d]), x);
      store(head_lanes + d * kLanes, x);
    }
    if (args.share_kv) {
      memcpy(copy, head_lanes, static_cast<size_t>(kLanes * dim) * 4);
      finish_values(args, copy);
      scatter(args, layer, head, true, tile, copy, rows);
    }
    if (is_v) {
      finish_values(args, head_lanes);
    } else {
      finish_keys(args, layer, tile, head_lanes);
    }
    scatter(args, layer, head, is_v, tile, head_lanes, rows);
  }
}

}  // namespace
}  // namespace carryover_kernels
