// The shim's own checks, chosen by name on the command line. Each prints one line; a wrong result is the exit status 1.
#include <stdio.h>
#include <stdlib.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "../../csrc/cuda/ptx.cuh"

using namespace carryover_kernels;

namespace {

void check(bool holds, const char* what) {
  if (holds) return;
  printf("wrong: %s\n", what);
  exit(1);
}

// Small integers: every product and sum is exact in any order.
float element(int i) { return static_cast<float>((i * 37 + 11) % 15 - 7); }
uint16_t bf16(float x) { return static_cast<uint16_t>(float_to_bits(x) >> 16); }
uint16_t f16(float x) {  // of small integers
  if (x == 0) return 0;
  const uint32_t bits = float_to_bits(x);
  return static_cast<uint16_t>((bits >> 16 & 0x8000) | (((bits >> 23 & 255) - 112) << 10) | (bits >> 13 & 0x3ff));
}

// a [16, 16] and b [16, 8], both row by row in shared memory, through ldmatrix; c = a b by the layout of the result.
template <class Half>
void mma_against_plain(uint16_t (*half)(float), Half type) {
  struct Tiles {
    uint16_t a[16][24], b[16][8];
  };
  float c[16][8];
  simt::launch({1}, 32, sizeof(Tiles), [&] {
    Tiles& tile = shared_memory<Tiles>();
    const int lane = static_cast<int>(threadIdx.x);
    for (int i = lane; i < 256; i += 32) tile.a[i / 16][i % 16] = half(element(i));
    for (int i = lane; i < 128; i += 32) tile.b[i / 8][i % 8] = half(element(1000 + i));
    __syncthreads();
    uint32_t a[4], b4[4];
    ldmatrix(a, &tile.a[lane % 16][lane / 16 * 8]);
    ldmatrix_transposed(b4, &tile.b[lane % 16][0]);
    const uint32_t b[2] = {b4[0], b4[1]};
    float d[4] = {1, 1, 1, 1};
    mma(d, a, b, type);
    for (int i = 0; i < 4; ++i) c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] = d[i];
  });
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 8; ++n) {
      float sum = 1;
      for (int k = 0; k < 16; ++k) sum += element(m * 16 + k) * element(1000 + k * 8 + n);
      check(c[m][n] == sum, "mma differs from a plain product");
    }
}

void warp() {
  simt::launch({2}, 64, 0, [] {
    const int lane = static_cast<int>(threadIdx.x % 32);
    check(__shfl_sync(kAllLanes, lane * 3, 5) == 15, "shfl");
    check(__shfl_xor_sync(kAllLanes, lane, 8) == (lane ^ 8), "shfl_xor");
    check(__shfl_up_sync(kAllLanes, lane, 1) == (lane ? lane - 1 : 0), "shfl_up");
    check(__shfl_down_sync(kAllLanes, double{1} * lane, 2) == (lane < 30 ? lane + 2 : lane), "shfl_down");
    check(__ballot_sync(kAllLanes, lane % 2) == 0xaaaaaaaau, "ballot");
    check(__any_sync(kAllLanes, lane == 31) && !__any_sync(kAllLanes, lane == 32), "any");
    check(__all_sync(kAllLanes, lane < 32) && !__all_sync(kAllLanes, lane < 31), "all");
    if (lane < 16) check(__shfl_xor_sync(0xffffu, lane, 1) == (lane ^ 1), "half a warp");
  });
}

void barrier() {
  int count = 0;
  std::vector<int> blocks(6);
  simt::launch({2, 3}, 96, 96 * 4, [&] {
    int* shared = &shared_memory<int>();
    check(shared[threadIdx.x] == -1, "shared memory starts with all bits set");
    for (int round = 0; round < 5; ++round) {
      shared[threadIdx.x] = round * 100 + static_cast<int>(threadIdx.x);
      __syncthreads();
      const unsigned other = (threadIdx.x + 40) % 96;
      check(shared[other] == round * 100 + static_cast<int>(other), "a barrier orders shared memory");
      __syncthreads();
    }
    atomicAdd(&count, 1);
    atomicMax(&blocks[blockIdx.y * gridDim.x + blockIdx.x], static_cast<int>(threadIdx.x));
  });
  check(count == 6 * 96, "every thread of every block runs once");
  for (int most : blocks) check(most == 95, "every block runs");
}

void copies() {
  alignas(16) static char from[64];
  for (int i = 0; i < 64; ++i) from[i] = static_cast<char>(i);
  simt::launch({1}, 32, 64, [] {
    char* to = &shared_memory<char>();
    if (threadIdx.x == 0) {
      copy_async(to, from, 16), copy_commit();
      copy_async(to + 16, from + 16, 3), copy_commit();
      check(to[0] == -1, "nothing arrives before the wait");
      copy_wait<1>();
      check(to[15] == 15 && to[16] == -1, "one group may be left");
      copy_wait<0>();
      check(to[18] == 18 && to[19] == 0 && to[31] == 0, "the rest is zeros");
    }
  });
}

void refused(const char* what, void (*body)()) {
  try {
    simt::launch({1}, 64, 64, body);
  } catch (const std::runtime_error& error) {
    check(std::string(error.what()).find(what) != std::string::npos, error.what());
    return;
  }
  check(false, what);
}

void strict() {
  refused("64 threads are at the barrier", [] { if (threadIdx.x > 3) __syncthreads(); });
  refused("at a collective", [] { if (threadIdx.x != 7) __shfl_sync(kAllLanes, 1, 0); });
  refused("its mask leaves out", [] { __shfl_sync(1u, 1, 0); });
  refused("multiple of 16", [] { copy_async(&shared_memory<char>() + 8, nullptr, 0); });
  refused("without waiting", [] { copy_async(&shared_memory<char>(), nullptr, 0); });
}

// --- faults that a sanitizer must find, each with the sound kernel beside it

void sums(bool barrier_there) {
  int total = 0;
  simt::launch({1}, 64, 64 * 4, [&] {
    int* shared = &shared_memory<int>();
    shared[threadIdx.x] = 1;
    if (barrier_there) __syncthreads();
    if (threadIdx.x == 0)
      for (int i = 0; i < 64; ++i) total += shared[i];
  });
  printf("total %d\n", total);
}

void blocks_write(bool apart) {
  std::vector<int> out(2);
  simt::launch({2}, 32, 0, [&] {
    if (threadIdx.x == 0) out[apart ? blockIdx.x : 0] = static_cast<int>(blockIdx.x);
  });
  printf("out %d\n", out[0]);
}

void writes_shared(unsigned count) {
  simt::launch({1}, 32, 32 * 4, [&] {
    int* shared = &shared_memory<int>();
    for (unsigned i = threadIdx.x; i < count; i += 32) shared[i] = 1;
  });
}

void writes_global(unsigned count) {
  std::vector<int> out(40);
  simt::launch({1}, 32, 0, [&] {
    for (unsigned i = threadIdx.x; i < count; i += 32) out.data()[i] = 1;
  });
}

}  // namespace

int main(int, char** arguments) {
  const std::string name = arguments[1];
  if (name == "mma") mma_against_plain(bf16, BFloat16{}), mma_against_plain(f16, Float16{});
  else if (name == "warp") warp();
  else if (name == "barrier") barrier();
  else if (name == "copies") copies();
  else if (name == "strict") strict();
  else if (name == "ordered") sums(true), blocks_write(true);
  else if (name == "race") sums(false);
  else if (name == "race_of_blocks") blocks_write(false);
  else if (name == "inside") writes_shared(32), writes_global(40);
  else if (name == "outside_shared") writes_shared(33);
  else if (name == "outside_global") writes_global(41);
  else check(false, "unknown name");
  printf("%s done\n", name.c_str());
}
