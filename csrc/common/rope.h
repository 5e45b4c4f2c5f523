// RoPE on one pair of elements: neox or interleaved, partial, plain or with every step rounded (rope_parity).
// Compiled by g++, nvcc and the SIMT shim; plain values only.
#pragma once

#include "scalar.h"

namespace carryover_kernels {

struct RopePair {
  int first, second;
};

// Where pair j of `half` pairs lies inside a head: (j, j + half) or (2j, 2j + 1).
CK_HD RopePair rope_pair(int j, int half, bool neox) {
  return neox ? RopePair{j, j + half} : RopePair{2 * j, 2 * j + 1};
}

struct Rotated {
  float first, second;
};

CK_HD Rotated rope_rotate(float first, float second, float cosine, float sine) {
  return {first * cosine - second * sine, second * cosine + first * sine};
}

// Transformers keeps cos and sin in the activation dtype and rounds each product and each sum. The caller rounds cos and sin.
template <class Round>
CK_HD Rotated rope_rotate_rounded(float first, float second, float cosine, float sine, Round round) {
  return {round(round(first * cosine) - round(second * sine)), round(round(second * cosine) + round(first * sine))};
}

}  // namespace carryover_kernels
