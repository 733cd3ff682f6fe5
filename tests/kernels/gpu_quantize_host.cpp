// The rules of quantize_repack.cuh, quantize_bf16.cuh and quantize_float.cuh as a library for test_gpu_quantize.py.
#include "quantize_bf16.cuh"
#include "quantize_float.cuh"
#include "quantize_repack.cuh"

using namespace requant;

// counts: shifted, lossy, below 2^-6, impossible
extern "C" void host_repack(int blocks, const uint8_t* codes, const uint8_t* scales, int m, uint8_t* out_codes,
                            uint8_t* out_scales, long long* counts) {
  for (int i = 0; i < blocks; ++i) {
    uint64_t halves[2];
    memcpy(halves, codes + 16 * i, 16);
    const int p = scales[i] - E8M0_BIAS - m;
    const bool dead = ((halves[0] | halves[1]) & 0x7777777777777777ull) == 0;
    Tally tally;
    for (int half = 0; half < 2; ++half)
      out_scales[2 * i + half] = static_cast<uint8_t>(settle_half(halves[half], p, dead, tally));
    memcpy(out_codes + 16 * i, halves, 16);
    counts[0] += tally.shifted, counts[1] += tally.lossy, counts[2] += tally.below, counts[3] += tally.impossible;
  }
}

// One half to (halvings, doublings, live).
extern "C" void host_limits(int halves, const uint64_t* codes, int* out) {
  for (int i = 0; i < halves; ++i) {
    const Limits found = limits_of(codes[i]);
    out[3 * i] = found.halvings, out[3 * i + 1] = found.doublings, out[3 * i + 2] = found.live;
  }
}

// Blocks of 16 BF16; taken[i] = 1 where the fast way took the block, 0 where the rule itself did.
extern "C" void host_bf16_nvfp4(int blocks, const uint32_t* pairs, float global_scale, uint32_t* codes, uint8_t* scales,
                                uint8_t* taken) {
  const GlobalScaleOf global = prepare(global_scale);
  for (int i = 0; i < blocks; ++i) {
    uint32_t in[8], out[2], scale = 0;
    memcpy(in, pairs + 8 * i, sizeof in);
    taken[i] = encode_fast(in, global, out, scale);
    if (!taken[i]) scale = encode_nvfp4(in, global_scale, out);
    scales[i] = static_cast<uint8_t>(scale);
    memcpy(codes + 2 * i, out, sizeof out);
  }
}

// Blocks of 16 of F16 (0), F32 (1) or FP8 (2) under a global scale; amax[0]: the bits of the largest of all.
template <Source KIND>
static void host_floats(const FloatArgs& args, float global_scale, uint32_t* codes, uint8_t* scales, uint32_t* amax) {
  for (size_t i = 0; i < args.blocks; ++i) {
    float v[16];
    uint32_t out[2];
    load_values<KIND>(args, i, v);
    amax[0] = amax[0] > values_amax(v) ? amax[0] : values_amax(v);
    scales[i] = static_cast<uint8_t>(encode_nvfp4_values(FloatValues{v}, values_amax(v), global_scale, out));
    memcpy(codes + 2 * i, out, sizeof out);
  }
}

extern "C" void host_float_nvfp4(int kind, const void* w, int blocks, int blocks_per_row, const float* grid, int high,
                                 int wide, int across, int row, float global_scale, uint32_t* codes, uint8_t* scales,
                                 uint32_t* amax) {
  const FloatArgs args{w, static_cast<size_t>(blocks), blocks_per_row, grid, high, wide, across, row};
  if (kind == 0) host_floats<Source::F16>(args, global_scale, codes, scales, amax);
  if (kind == 1) host_floats<Source::F32>(args, global_scale, codes, scales, amax);
  if (kind == 2) host_floats<Source::FP8>(args, global_scale, codes, scales, amax);
}
