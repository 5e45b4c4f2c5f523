# find_package(carryover_kernels): the target carryover_kernels::cpu, whose header is <carryover_kernels/ops.h>.
# Its tensors are torch::stable::Tensor, so a consumer needs libtorch too: put torch.utils.cmake_prefix_path into CMAKE_PREFIX_PATH.
include(CMakeFindDependencyMacro)
if(NOT TARGET torch)
  find_dependency(Torch)
endif()
include("${CMAKE_CURRENT_LIST_DIR}/carryover_kernelsTargets.cmake")
set_property(TARGET carryover_kernels::cpu APPEND PROPERTY INTERFACE_LINK_LIBRARIES torch)
