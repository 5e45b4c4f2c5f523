// What is no tensor op: facts about this build, and the split planner that the Triton launchers share with the C++ doors.
#include <pybind11/pybind11.h>

#include "common/split_planner.h"

PYBIND11_MODULE(_build, m) {
  m.doc() = "Build information and the host-side split planner.";
  m.attr("torch_version") = CARRYOVER_TORCH_VERSION;
  m.attr("compiler") = CARRYOVER_COMPILER;
  m.attr("cpu_isas") = CARRYOVER_CPU_ISAS;
  m.def(
      "plan_splits", &carryover_kernels::plan_splits, pybind11::arg("tasks"), pybind11::arg("keys"), pybind11::arg("workers"),
      pybind11::arg("tile"), "Parts to cut the keys of each of `tasks` units into, so that `workers` are busy.");
}
