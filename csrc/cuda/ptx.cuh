// What device code asks of the machine, behind names that two compilers know: nvcc gives the instruction, g++ the shim of tests/simt.
#pragma once

#include "../common/scalar.h"

#if defined(__CUDACC__)
#define CK_DEVICE static inline __device__
#define CK_METHOD __device__
#define CK_KERNEL static __global__
#define CK_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
#define CK_UNROLL _Pragma("unroll")
#define CK_ROLLED _Pragma("unroll 1")
#else
#include "simt.h"
#define CK_DEVICE [[maybe_unused]] static inline
#define CK_METHOD
#define CK_KERNEL [[maybe_unused]] static
#define CK_BOUNDS(threads, blocks)
#define CK_UNROLL
#define CK_ROLLED
#endif

namespace carryover_kernels {

constexpr unsigned kAllLanes = 0xffffffffu;

// The block's shared memory: one object, as large as the launch said.
template <class T>
CK_DEVICE T& shared_memory() {
#if defined(__CUDACC__)
  extern __shared__ __align__(16) char carryover_shared[];
  return *reinterpret_cast<T*>(carryover_shared);
#else
  return *static_cast<T*>(simt::shared_memory());
#endif
}

struct alignas(16) Words {
  uint32_t word[4];
};

// 16 bytes in one access; the address must be a multiple of 16.
CK_DEVICE Words load_words(const void* from) {
#if defined(__CUDACC__)
  return *static_cast<const Words*>(from);
#else
  Words words;
  if (reinterpret_cast<uintptr_t>(from) % 16) simt::fail("a load of 16 bytes: the address is not a multiple of 16");
  memcpy(&words, from, 16);
  return words;
#endif
}

CK_DEVICE void store_words(void* to, const Words& words) {
#if defined(__CUDACC__)
  *static_cast<Words*>(to) = words;
#else
  if (reinterpret_cast<uintptr_t>(to) % 16) simt::fail("a store of 16 bytes: the address is not a multiple of 16");
  memcpy(to, &words, 16);
#endif
}

CK_DEVICE bool aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// d += a b, 16 x 16 by 16 x 8, fragments as in the PTX ISA's m16n8k16.
CK_DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], BFloat16) {
#if defined(__CUDACC__)
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  simt::mma_m16n8k16(d, a, b, bfloat16_value);
#endif
}

CK_DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Float16) {
#if defined(__CUDACC__)
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  simt::mma_m16n8k16(d, a, b, float16_value);
#endif
}

#if defined(__CUDACC__)
CK_DEVICE uint32_t shared_address(const void* at) { return static_cast<uint32_t>(__cvta_generic_to_shared(at)); }
#endif

// Four 8 x 8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
CK_DEVICE void ldmatrix(uint32_t (&out)[4], const void* row) {
#if defined(__CUDACC__)
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(row))
               : "memory");
#else
  simt::ldmatrix_x4(out, row, false);
#endif
}

CK_DEVICE void ldmatrix_transposed(uint32_t (&out)[4], const void* row) {
#if defined(__CUDACC__)
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(row))
               : "memory");
#else
  simt::ldmatrix_x4(out, row, true);
#endif
}

// 16 bytes from global to shared memory, zeros after the first `bytes`; there once copy_wait has let its group through.
CK_DEVICE void copy_async(void* to, const void* from, int bytes) {
#if defined(__CUDACC__)
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
#else
  simt::copy_async(to, from, bytes);
#endif
}

CK_DEVICE void copy_commit() {
#if defined(__CUDACC__)
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  simt::copy_commit();
#endif
}

// This thread's copies, but for its last `kGroupsLeft` groups; other threads see them after a barrier.
template <int kGroupsLeft>
CK_DEVICE void copy_wait() {
#if defined(__CUDACC__)
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroupsLeft) : "memory");
#else
  simt::copy_wait(kGroupsLeft);
#endif
}

}  // namespace carryover_kernels
