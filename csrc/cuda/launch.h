// How a door starts a kernel: on the current stream of the tensors' device, or on the shim of tests/simt, where the tensors are the CPU's.
#pragma once

#include "../common/arguments.h"
#include "ptx.cuh"

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#endif

namespace carryover_kernels {

#if defined(__CUDACC__)
#define CARRYOVER_CUDA_IMPL(m) STABLE_TORCH_LIBRARY_IMPL(carryover_kernels, CUDA, m)

// PyTorch's own C function, looked up when first needed: a library that linked it would not load beside a PyTorch without CUDA.
inline cudaStream_t current_stream(int32_t device) {
  using Function = int32_t (*)(int32_t, void**);
  static const auto function = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream"));
  STD_TORCH_CHECK(function, "this PyTorch has no CUDA, must be built with it");
  void* stream = nullptr;
  STD_TORCH_CHECK(function(device, &stream) == 0, "PyTorch gives no current CUDA stream");
  return static_cast<cudaStream_t>(stream);
}

// `blocks` blocks of `threads` threads with `shared` bytes of shared memory; none is no launch.
template <class Params>
void launch(void (*kernel)(Params), int64_t blocks, int threads, const Tensor& on, const Params& params, int shared = 0) {
  if (blocks == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(on.get_device());
  if (shared > 48 * 1024) {  // more than a kernel may have unasked
    const cudaError_t refused = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    STD_TORCH_CHECK(refused == cudaSuccess, "a kernel cannot have ", shared, " bytes of shared memory: ", cudaGetErrorString(refused));
  }
  kernel<<<static_cast<unsigned>(blocks), threads, shared, current_stream(on.get_device())>>>(params);
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, "a kernel did not start: ", cudaGetErrorString(error));
}
// Blocks that the device keeps busy at once, two an SM: what a split over keys is planned for.
inline int64_t workers(const Tensor& on) {
  int count = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, on.get_device());
  STD_TORCH_CHECK(error == cudaSuccess, "the device does not tell its number of SMs: ", cudaGetErrorString(error));
  return 2 * count;
}
#else
#define CARRYOVER_CUDA_IMPL(m) STABLE_TORCH_LIBRARY_IMPL(carryover_kernels, CPU, m)

template <class Params>
void launch(void (*kernel)(Params), int64_t blocks, int threads, const Tensor&, const Params& params, int shared = 0) {
  if (blocks == 0) return;
  simt::launch({static_cast<unsigned>(blocks)}, static_cast<unsigned>(threads), static_cast<size_t>(shared), [&] { kernel(params); });
}

inline int64_t workers(const Tensor&) { return 8; }
#endif

// Scratch memory of one call, from PyTorch's caching allocator, cut into pieces of 4-byte elements; sound until the call's kernels have run,
// since the allocator hands it out again to this stream alone.
class Workspace {
 public:
  Workspace(const Tensor& like, int64_t elements)
      : memory_(torch::stable::new_empty(like, {elements}, ScalarType::Int)), left_(elements), next_(static_cast<char*>(memory_.data_ptr())) {}

  template <class T>
  T* take(int64_t count) {
    static_assert(sizeof(T) == 4);
    STD_TORCH_CHECK(count <= left_, "a workspace is ", left_, " elements, must be ", count);
    T* piece = reinterpret_cast<T*>(next_);
    left_ -= count;
    next_ += count * 4;
    return piece;
  }

 private:
  Tensor memory_;
  int64_t left_;
  char* next_;
};

inline int64_t blocks_for(int64_t units, int64_t units_a_block) { return (units + units_a_block - 1) / units_a_block; }

}  // namespace carryover_kernels
