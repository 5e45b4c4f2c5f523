// Compiled once per instruction set with CARRYOVER_ISA = portable, avx2, avx512, avx512bf16 or amx and that set's flags.
#include "kernels.h"

#include "block_attention_tile.h"
#include "dot_rows_tile.h"
#include "project_states_tile.h"
#include "qk_norm_rope_tile.h"

#ifndef CARRYOVER_ISA
#error "CARRYOVER_ISA is not defined, must be portable, avx2, avx512, avx512bf16 or amx"
#endif
#define CK_JOIN2(a, b) a##b
#define CK_JOIN(a, b) CK_JOIN2(a, b)
#define CK_TEXT2(a) #a
#define CK_TEXT(a) CK_TEXT2(a)

namespace carryover_kernels {
namespace {

void enter() {
#if defined(__AMX_BF16__)
  amx_configure();
#endif
}

void leave() {
#if defined(__AMX_BF16__)
  _tile_release();
#endif
}

}  // namespace

extern const KernelTable CK_JOIN(kernels_, CARRYOVER_ISA);
const KernelTable CK_JOIN(kernels_, CARRYOVER_ISA) = {
    CK_TEXT(CARRYOVER_ISA), attention_workspace, attention_part, attention_merge, project_sizes, project_workspace,
    project_pack, project_fc, project_norms, project_kv, qk_norm_rope, dot_rows, enter, leave,
};

}  // namespace carryover_kernels
