#include "isa.h"

#include <cstdlib>
#include <stdexcept>
#include <vector>

#if defined(CARRYOVER_HAVE_X86_ISAS)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace carryover_kernels {

extern const KernelTable kernels_portable;
#if defined(CARRYOVER_HAVE_X86_ISAS)
extern const KernelTable kernels_avx2, kernels_avx512, kernels_avx512bf16, kernels_amx;
#endif

namespace {

#if defined(CARRYOVER_HAVE_X86_ISAS)
bool has_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool tile = d >> 24 & 1, bf16 = d >> 22 & 1;
  if (!tile || !bf16) return false;
#if defined(__linux__)
  // The kernel hands out the 8 KB of tile registers on request: ARCH_REQ_XCOMP_PERM for feature 18, for the whole process.
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
  return false;
#endif
}
#endif

std::vector<const KernelTable*> available() {
  std::vector<const KernelTable*> tables = {&kernels_portable};
#if defined(CARRYOVER_HAVE_X86_ISAS)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return tables;
  tables.push_back(&kernels_avx2);
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") ||
      !__builtin_cpu_supports("avx512dq"))
    return tables;
  tables.push_back(&kernels_avx512);
  if (!__builtin_cpu_supports("avx512bf16")) return tables;
  tables.push_back(&kernels_avx512bf16);
  if (has_amx()) tables.push_back(&kernels_amx);
#endif
  return tables;
}

const KernelTable& choose() {
  const std::vector<const KernelTable*> tables = available();
  const char* forced = std::getenv("CARRYOVER_CPU_ISA");
  if (!forced || !*forced) return *tables.back();
  for (const KernelTable* table : tables)
    if (std::string(forced) == table->name) return *table;
  throw std::runtime_error(
      "carryover_kernels: CARRYOVER_CPU_ISA is '" + std::string(forced) + "', must be one of those this machine has: " + isa_available());
}

}  // namespace

const KernelTable& kernels() {
  static const KernelTable& chosen = choose();
  return chosen;
}

std::string isa_available() {
  std::string names;
  for (const KernelTable* table : available()) names += (names.empty() ? "" : ", ") + std::string(table->name);
  return names;
}

}  // namespace carryover_kernels
