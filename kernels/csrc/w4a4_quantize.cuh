// Activations, BF16 [rows, K] -> FP4 codes [rows, K/2] and block scales [rows, K/group], in the weights' own layout.
//
// One CTA per row; a thread encodes whole blocks (32 or 64 bytes in, 8 or 16 out). The global scale of NVFP4 is given,
// or derived per token from the row itself (which is then read twice, the second time from cache), or from the whole
// tensor by way of row_amax. Non-finite values take no part in it: see w4a4_encode.cuh.
#pragma once
#include "w4a4_encode.cuh"

namespace requant {

enum class GlobalScale { GIVEN, TOKEN, TENSOR };

struct QuantizeArgs {
  const void* x;       // BF16 bits [rows, K], 16-byte aligned
  uint8_t* codes;      // [rows, K/2]
  uint8_t* scales;     // [rows, K/group]
  float* global;       // NVFP4: GIVEN in [1], TOKEN out [rows], TENSOR out [1]
  float* row_amax;     // TENSOR: scratch [rows]
  int rows, K;
};

constexpr int QUANTIZE_THREADS = 256;

// Largest value over the CTA; every thread gets it.
__device__ inline float cta_max(float value) {
  __shared__ float warps[QUANTIZE_THREADS / 32];
  for (int offset = 16; offset; offset /= 2) value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, offset));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = warps[0];
  for (int warp = 1; warp < QUANTIZE_THREADS / 32; ++warp) value = fmaxf(value, warps[warp]);
  return value;
}

// Largest finite |value| of this CTA's row.
__device__ inline float row_finite_amax(const uint4* row, int K) {
  uint32_t amax = 0;
  for (int i = threadIdx.x; i < K / 8; i += QUANTIZE_THREADS) {
    uint4 v = row[i];
    const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
    FP4_UNROLL
    for (int j = 0; j < 8; ++j) {
      uint32_t magnitude = pairs[j / 2] >> (16 * (j % 2)) & 0x7FFF;
      if (magnitude < BF16_INFINITY) amax = max(amax, magnitude);
    }
  }
  return cta_max(bf16_value(amax));
}

__global__ void __launch_bounds__(QUANTIZE_THREADS) row_amax_kernel(const QuantizeArgs args) {
  size_t row = blockIdx.x;
  float amax = row_finite_amax(static_cast<const uint4*>(args.x) + row * (args.K / 8), args.K);
  if (threadIdx.x == 0) args.row_amax[row] = amax;
}

template <Format FORMAT, GlobalScale GLOBAL>
__global__ void __launch_bounds__(QUANTIZE_THREADS) quantize_kernel(const QuantizeArgs args) {
  constexpr int GROUP = FORMAT == Format::NVFP4 ? 16 : 32;
  size_t row = blockIdx.x;
  const uint4* x = static_cast<const uint4*>(args.x) + row * (args.K / 8);
  float global_scale = 1.0f;
  if constexpr (FORMAT == Format::NVFP4) {
    if constexpr (GLOBAL == GlobalScale::GIVEN) {
      global_scale = *args.global;
    } else {
      float amax = 0.0f;
      if constexpr (GLOBAL == GlobalScale::TOKEN) {
        amax = row_finite_amax(x, args.K);
      } else {
        for (int i = threadIdx.x; i < args.rows; i += QUANTIZE_THREADS) amax = fmaxf(amax, args.row_amax[i]);
        amax = cta_max(amax);
      }
      global_scale = nvfp4_global_scale(amax);
      bool owner = GLOBAL == GlobalScale::TOKEN || row == 0;
      if (owner && threadIdx.x == 0) args.global[row] = global_scale;
    }
  }

  for (int block = threadIdx.x; block < args.K / GROUP; block += QUANTIZE_THREADS) {
    uint32_t pairs[GROUP / 2];
    FP4_UNROLL
    for (int i = 0; i < GROUP / 8; ++i) {
      uint4 v = x[block * (GROUP / 8) + i];
      pairs[4 * i] = v.x, pairs[4 * i + 1] = v.y, pairs[4 * i + 2] = v.z, pairs[4 * i + 3] = v.w;
    }
    size_t index = row * (args.K / GROUP) + block;
    uint32_t codes[GROUP / 8];
    if constexpr (FORMAT == Format::NVFP4) {
      args.scales[index] = static_cast<uint8_t>(encode_nvfp4(pairs, global_scale, codes));
      reinterpret_cast<uint2*>(args.codes)[index] = make_uint2(codes[0], codes[1]);
    } else {
      args.scales[index] = static_cast<uint8_t>(encode_mxfp4(pairs, codes));
      reinterpret_cast<uint4*>(args.codes)[index] = make_uint4(codes[0], codes[1], codes[2], codes[3]);
    }
  }
}

}  // namespace requant
