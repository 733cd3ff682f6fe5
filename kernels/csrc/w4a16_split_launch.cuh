// Host side of w4a16_split.cuh: the variants that are compiled in, shared memory, launch.
#pragma once
#include <cuda_runtime.h>

#include "w4a16_split.cuh"

namespace requant {

struct SplitVariant {
  Format format;
  int k, warps, depth, slot_bytes, scale_pitch;
  void (*kernel)(Params);
};

template <Format FORMAT, int WARPS, int DEPTH>
constexpr SplitVariant split_variant() {
  using Tile = SplitTile<FORMAT, WARPS>;
  return {FORMAT, Tile::kK, WARPS, DEPTH, Tile::kSlotBytes, Tile::kRowScales, w4a16_split_kernel<FORMAT, WARPS, DEPTH>};
}

// Those that kernels/w4a16_configs.py asks for.
constexpr SplitVariant kSplits[] = {
    split_variant<Format::kNvfp4, 15, 4>(),
    split_variant<Format::kMxfp4, 15, 4>(),
#ifdef REQUANT_SWEEP
#include "w4a16_sweep_splits.inc"
#endif
};
constexpr int kSplitCount = sizeof(kSplits) / sizeof(kSplits[0]);

// 0, or a code of requant_w4a16. `p` holds pointers and sizes.
inline int launch_split(const Params& p, Format format, int depth, int warps, int blocks, int early_start, int most_shared,
                        cudaStream_t stream) {
  const SplitVariant* chosen = nullptr;
  for (const SplitVariant& v : kSplits) {
    if (v.format == format && v.k == p.k && v.depth == depth && v.warps == warps) chosen = &v;
  }
  if (chosen == nullptr) return -1;
  if (p.rows * chosen->scale_pitch % 16 != 0) return -8;
  Params q = p;
  q.row_groups = (p.rows + kTileRows - 1) / kTileRows;
  const int shared = depth * chosen->slot_bytes + depth * 8;
  if (shared > most_shared) return -2;
  cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(chosen->kernel),
                                           cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1, blocks);
  config.blockDim = dim3(32, 1, warps + 1);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = early_start ? 1 : 0;
  error = cudaLaunchKernelEx(&config, chosen->kernel, q);
  return error != cudaSuccess ? error : cudaGetLastError();
}

}  // namespace requant
