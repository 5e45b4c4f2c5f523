// What the library says of itself, through plain C so that Python's ctypes and any loader can ask.
#include "isa.h"

#include <exception>

#define CARRYOVER_C_API extern "C" __attribute__((visibility("default")))

// The instruction set in use, or the sentence why there is none (CARRYOVER_CPU_ISA names one that this machine lacks).
CARRYOVER_C_API const char* carryover_cpu_isa() {
  static const std::string answer = [] {
    try {
      return std::string(carryover_kernels::kernels().name);
    } catch (const std::exception& error) {
      return std::string(error.what());
    }
  }();
  return answer.c_str();
}

// Those that are built and that this machine has, slowest first, separated by commas.
CARRYOVER_C_API const char* carryover_cpu_isas() {
  static const std::string names = carryover_kernels::isa_available();
  return names.c_str();
}
