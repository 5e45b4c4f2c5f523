// The fibers behind simt.h. This file is never instrumented: a sanitizer sees device code alone, and hears from here which fiber runs
// and what orders memory (barriers and __syncwarp do, shuffles do not).
#include "simt.h"

#include <ucontext.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(SIMT_THREAD_SANITIZER)
#include <sanitizer/tsan_interface.h>
#elif defined(SIMT_ADDRESS_SANITIZER)
#include <sanitizer/common_interface_defs.h>
#endif

namespace simt {

Place* here = nullptr;

namespace {

constexpr size_t kStack = 256 * 1024;
constexpr size_t kMostBytes = 64;

struct Copy {
  char* to;
  const char* from;
  int bytes;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStack]};
  Place place;
  bool done = false;
  const unsigned* waits_for = nullptr;  // runnable once this counter has left `seen`
  unsigned seen = 0;
  std::vector<std::vector<Copy>> copies;  // cp.async: groups, the last one still open
  void* sanitizer = nullptr;
};

struct Warp {
  unsigned arrived = 0, mask = 0, generation = 0;
  size_t bytes = 0;
  char slots[2][32][kMostBytes];  // by parity of the generation: a lane may start the next exchange before others have read this one
};

std::vector<std::unique_ptr<Fiber>> fibers;
std::vector<Warp> warps;
ucontext_t main_context;
Fiber* running = nullptr;
unsigned launches = 0, barrier_arrived = 0, barrier_generation = 0, threads_of_block = 0;
char* shared = nullptr;
const std::function<void()>* kernel = nullptr;
std::string failure;
char start_mark, end_mark, barrier_mark;  // addresses that stand for an order, for ThreadSanitizer
#if defined(SIMT_THREAD_SANITIZER)
void* main_sanitizer = nullptr;
std::vector<std::unique_ptr<Fiber>> ended;
#elif defined(SIMT_ADDRESS_SANITIZER)
const void* main_stack = nullptr;
size_t main_stack_size = 0;
#endif

// Not memcpy, which a sanitizer watches wherever it is called from: a collective is no access to memory.
__attribute__((optimize("no-tree-loop-distribute-patterns"))) void move(char* to, const char* from, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) to[i] = from[i];
}

// For ThreadSanitizer each block has fibers and stacks of its own, kept a while: it forgets what a destroyed fiber did, and takes a stack
// that two blocks use for a race. It can have 8000 fibers.
void keep_fibers() {
#if defined(SIMT_THREAD_SANITIZER)
  for (auto& fiber : fibers) ended.push_back(std::move(fiber));
  fibers.clear();
#endif
}

void forget_fibers([[maybe_unused]] size_t at_most) {
#if defined(SIMT_THREAD_SANITIZER)
  if (ended.size() <= at_most) return;
  __tsan_acquire(&end_mark);
  for (auto& fiber : ended) __tsan_destroy_fiber(fiber->sanitizer);
  ended.clear();
#endif
}

void release([[maybe_unused]] void* mark) {
#if defined(SIMT_THREAD_SANITIZER)
  __tsan_release(mark);
#endif
}

void acquire([[maybe_unused]] void* mark) {
#if defined(SIMT_THREAD_SANITIZER)
  __tsan_acquire(mark);
#endif
}

void to_main() {
  Fiber* me = running;
#if defined(SIMT_THREAD_SANITIZER)
  __tsan_switch_to_fiber(main_sanitizer, __tsan_switch_to_fiber_no_sync);
#elif defined(SIMT_ADDRESS_SANITIZER)
  __sanitizer_start_switch_fiber(me->done ? nullptr : &me->sanitizer, main_stack, main_stack_size);
#endif
  swapcontext(&me->context, &main_context);
#if defined(SIMT_ADDRESS_SANITIZER)
  __sanitizer_finish_switch_fiber(me->sanitizer, &main_stack, &main_stack_size);
#endif
}

void to_fiber(Fiber* fiber) {
  running = fiber;
  here = &fiber->place;
#if defined(SIMT_THREAD_SANITIZER)
  __tsan_switch_to_fiber(fiber->sanitizer, __tsan_switch_to_fiber_no_sync);
#elif defined(SIMT_ADDRESS_SANITIZER)
  void* own = nullptr;
  __sanitizer_start_switch_fiber(&own, fiber->stack.get(), kStack);
#endif
  swapcontext(&main_context, &fiber->context);
#if defined(SIMT_ADDRESS_SANITIZER)
  __sanitizer_finish_switch_fiber(own, nullptr, nullptr);
#endif
}

void enter() {
#if defined(SIMT_ADDRESS_SANITIZER)
  __sanitizer_finish_switch_fiber(nullptr, &main_stack, &main_stack_size);
#endif
  acquire(&start_mark);
  (*kernel)();
  for (const auto& group : running->copies)
    if (!group.empty() && failure.empty()) failure = "cp.async: a thread ended without waiting for its copies";
  release(&end_mark);
  running->done = true;
  to_main();
}

// Until `counter` is no longer what it was.
void wait_for(const unsigned* counter, unsigned seen) {
  running->waits_for = counter;
  running->seen = seen;
  to_main();
  running->waits_for = nullptr;
}

void run_block() {
  for (unsigned left = threads_of_block; left > 0 && failure.empty();) {
    bool moved = false;
    for (unsigned t = 0; t < threads_of_block && failure.empty(); ++t) {
      Fiber* fiber = fibers[t].get();
      if (fiber->done || (fiber->waits_for && *fiber->waits_for == fiber->seen)) continue;
      to_fiber(fiber);
      moved = true;
      left -= fiber->done;
    }
    if (!moved) {
      failure = "deadlock: " + std::to_string(barrier_arrived) + " of " + std::to_string(threads_of_block) + " threads are at the barrier";
      for (const Warp& warp : warps)
        if (warp.arrived) failure += ", lanes " + std::to_string(warp.arrived) + " of " + std::to_string(warp.mask) + " at a collective";
    }
  }
}

}  // namespace

void launch(Dim grid, unsigned threads, size_t shared_bytes, const std::function<void()>& body) {
  if (threads == 0 || threads % 32 || threads > 1024) throw std::runtime_error("simt: a block must have a multiple of 32 threads, at most 1024");
  ++launches;
  kernel = &body;
  failure.clear();
  threads_of_block = threads;
#if defined(SIMT_THREAD_SANITIZER)
  main_sanitizer = __tsan_get_current_fiber();
#endif
  std::vector<std::unique_ptr<uint64_t[]>> memory;  // of all blocks, freed after the last: to free it is a write to it
  const unsigned blocks = grid.x * grid.y * grid.z;
  for (unsigned b = 0; b < blocks && failure.empty(); ++b) {
    const unsigned block = blocks - 1 - b;  // backwards: no kernel may count on the order
    // In words of 64 bits, so that it is aligned as a GPU aligns it; a size of its own lets AddressSanitizer see its end.
    const size_t words = (shared_bytes + 15) / 16 * 2;
    memory.emplace_back(words ? new uint64_t[words] : nullptr);
    std::fill_n(memory.back().get(), words, ~uint64_t{0});
    shared = reinterpret_cast<char*>(memory.back().get());
    warps.assign(threads / 32, Warp{});
    barrier_arrived = 0;
    while (fibers.size() < threads) fibers.push_back(std::make_unique<Fiber>());
    for (unsigned t = 0; t < threads; ++t) {
      Fiber& fiber = *fibers[t];
      fiber.place = {{t, 0, 0}, {block % grid.x, block / grid.x % grid.y, block / grid.x / grid.y}, {threads, 1, 1}, grid};
      fiber.done = false;
      fiber.waits_for = nullptr;
      fiber.copies.assign(1, {});
      getcontext(&fiber.context);
      fiber.context.uc_stack = {fiber.stack.get(), 0, kStack};
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, enter, 0);
#if defined(SIMT_THREAD_SANITIZER)
      fiber.sanitizer = __tsan_create_fiber(0);
#endif
    }
    release(&start_mark);
    run_block();
    keep_fibers();
    forget_fibers(5000);
  }
  acquire(&end_mark);
  forget_fibers(0);
  here = nullptr;
  if (!failure.empty()) throw std::runtime_error("simt: " + failure);
}

// For tests that must know that the shim ran, and no other library.
extern "C" __attribute__((visibility("default"))) unsigned simt_launches() { return launches; }

void* shared_memory() { return shared; }

void fail(const char* sentence) {
  if (failure.empty()) failure = sentence;
  to_main();
  abort();  // a failed launch resumes no fiber
}

void sync_threads() {
  const unsigned generation = barrier_generation;
  release(&barrier_mark);
  if (++barrier_arrived == threads_of_block) {
    barrier_arrived = 0;
    ++barrier_generation;
  } else {
    wait_for(&barrier_generation, generation);
  }
  acquire(&barrier_mark);
}

void exchange(unsigned mask, const void* mine, size_t bytes, void* all) {
  Warp& warp = warps[here->thread.x / 32];
  const unsigned bit = 1u << lane(), generation = warp.generation;
  if (bytes > kMostBytes) fail("a collective of more than 64 bytes a lane");
  if (!(mask & bit)) fail("a collective is called by a lane that its mask leaves out");
  if (warp.arrived && (warp.mask != mask || warp.bytes != bytes)) fail("the lanes of a warp are at different collectives");
  warp.mask = mask;
  warp.bytes = bytes;
  move(warp.slots[generation % 2][lane()], static_cast<const char*>(mine), bytes);
  if ((warp.arrived |= bit) == mask) {
    warp.arrived = 0;
    ++warp.generation;
  } else {
    wait_for(&warp.generation, generation);
  }
  for (unsigned i = 0; i < 32; ++i) move(static_cast<char*>(all) + i * bytes, warp.slots[generation % 2][i], bytes);
}

void sync_warp(unsigned mask) {
  char nothing = 0, all[32];
  void* mark = &warps[here->thread.x / 32];
  release(mark);
  exchange(mask, &nothing, 1, all);
  acquire(mark);
}

void copy_async(void* to, const void* from, int bytes) {
  if (reinterpret_cast<uintptr_t>(to) % 16 || (bytes > 0 && reinterpret_cast<uintptr_t>(from) % 16))
    fail("cp.async: an address is not a multiple of 16");
  if (bytes < 0 || bytes > 16) fail("cp.async: more than 16 bytes");
  running->copies.back().push_back({static_cast<char*>(to), static_cast<const char*>(from), bytes});
}

void copy_commit() { running->copies.push_back({}); }

// The next copy that must be there when at most `groups_left` committed groups may be under way; false where none is left.
bool next_copy(int groups_left, char** to, const char** from, int* bytes) {
  auto& groups = running->copies;
  while (groups.size() > static_cast<size_t>(groups_left) + 1 && groups.front().empty()) groups.erase(groups.begin());
  if (groups.size() <= static_cast<size_t>(groups_left) + 1) return false;
  const Copy copy = groups.front().back();
  groups.front().pop_back();
  *to = copy.to, *from = copy.from, *bytes = copy.bytes;
  return true;
}

}  // namespace simt
