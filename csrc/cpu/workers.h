// Independent units of work over PyTorch's threads, taken one by one: a core that something else slows down takes fewer.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "isa.h"

namespace carryover_kernels {

struct FreeDeleter {
  void operator()(void* at) const { std::free(at); }
};

// Uninitialised, 64-byte aligned memory of one call.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : at_(bytes > 0 ? std::aligned_alloc(64, static_cast<size_t>((bytes + 63) / 64 * 64)) : nullptr) {
    if (bytes > 0 && !at_) throw std::bad_alloc();
  }
  void* get() const { return at_.get(); }
  template <class T>
  T* as() const {
    return static_cast<T*>(at_.get());
  }

 private:
  std::unique_ptr<void, FreeDeleter> at_;
};

// Memory that a thread keeps between calls: a fresh allocation of this size would be page-faulted in again each time.
inline void* thread_workspace(int64_t bytes) {
  static thread_local Scratch kept(0);
  static thread_local int64_t size = 0;
  if (bytes > size) {
    kept = Scratch(bytes);
    size = bytes;
  }
  return kept.get();
}

// run(unit, workspace) for every unit; on this thread alone where there is too little to share.
template <class Run>
void for_units(int64_t units, int64_t workspace_bytes, bool alone, const Run& run) {
  const KernelTable& table = kernels();
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    void* workspace = thread_workspace(workspace_bytes);
    table.enter();
    for (int64_t unit = next++; unit < units; unit = next++) run(unit, workspace);
    table.leave();
  };
  const int64_t threads = alone ? 1 : std::min<int64_t>(units, torch::stable::get_num_threads());
  if (threads <= 1) {
    if (units > 0) work();
    return;
  }
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) { work(); });
}

}  // namespace carryover_kernels
