// Which of the kernel tables runs: the best that this machine has, or the one that CARRYOVER_CPU_ISA names.
#pragma once

#include <string>

#include "kernels.h"

namespace carryover_kernels {

// Chosen once. Throws with one sentence where CARRYOVER_CPU_ISA names a set that is unknown, not built or not had by this machine.
const KernelTable& kernels();

// Sets that are built and that this machine has, slowest first, comma separated.
std::string isa_available();

}  // namespace carryover_kernels
