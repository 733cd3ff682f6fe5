// The wgmma kernel's warpgroups that consume: codes and block scales to BF16 in registers, and their products with x.
#pragma once
#include "fp4_decode.cuh"
#include "ptx.cuh"
#include "w4a16_wgmma_types.cuh"

namespace requant {

__device__ __forceinline__ uint32_t word_at(const uint4& v, int w) { return w == 0 ? v.x : w == 1 ? v.y : w == 2 ? v.z : v.w; }

// 8 codes of one row -> BF16 pairs of two k steps, times the block scales of the first and of the second: the upper or the
// lower halves.
template <Format FORMAT>
__device__ __forceinline__ void decode_scaled(uint32_t codes, uint32_t first, uint32_t second, bool upper,
                                              uint32_t (&pairs)[4]) {
  decode_e2m1_bf16(codes, pairs);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t scales = i < 2 ? first : second;
    const __nv_bfloat162 two = *reinterpret_cast<const __nv_bfloat162*>(&scales);
    if (FORMAT == Format::kMxfp4) pairs[i] = multiply_bf162(pairs[i], __float2bfloat162_rn(0x1p126f));
    pairs[i] = multiply_bf162(pairs[i], upper ? __high2bfloat162(two) : __low2bfloat162(two));
  }
}

// Four block scales of NVFP4 -> BF16 pairs (0, 2) and (1, 3), times 2^110. Wrong for special_scales.
__device__ __forceinline__ void lift_e4m3(uint32_t bytes, uint32_t (&pairs)[2]) {
  const __nv_bfloat162 lift = __float2bfloat162_rn(0x1p115f);
  pairs[0] = multiply_bf162(multiply_bf162((bytes & 0x007F007Fu) << 4, lift), lift);
  pairs[1] = multiply_bf162(multiply_bf162((bytes >> 4) & 0x07F007F0u, lift), lift);
}

// The same for any bytes.
__device__ __forceinline__ void convert_e4m3(uint32_t bytes, uint32_t (&pairs)[2]) {
  const __nv_bfloat162 low = decode_e4m3x2_bf16(bytes), high = decode_e4m3x2_bf16(bytes >> 16);
  const __nv_bfloat162 even = __lows2bfloat162(low, high), odd = __highs2bfloat162(low, high);
  pairs[0] = *reinterpret_cast<const uint32_t*>(&even);
  pairs[1] = *reinterpret_cast<const uint32_t*>(&odd);
}

// Whether the four block scales hold one that lift_e4m3 gets wrong: NaN or negative.
__device__ __forceinline__ bool special_e4m3(uint32_t bytes) {
  return ((((bytes & 0x7F7F7F7Fu) + 0x01010101u) | bytes) & 0x80808080u) != 0;
}

// Two block scales of MXFP4 (bytes 0 and 1) -> one BF16 pair: 0 is 2^-127, 255 NaN.
__device__ __forceinline__ uint32_t lift_e8m0x2(uint32_t bytes) {
  const uint32_t low = bytes & 0xFFu, high = (bytes >> 8) & 0xFFu;
  return low << 7 | high << 23 | (low == 0 || low == 255 ? 0x0040u : 0u) | (high == 0 || high == 255 ? 0x00400000u : 0u);
}

// A warpgroup's way through the ring of its k group's x.
template <int TOKENS>
struct XReader {
  static constexpr int kStage = kXBlocks<TOKENS> * TOKENS * kBlockK * 2;
  uint64_t tile = 0;  // descriptor of B at the next 64 or 128 k
  uint32_t ring, last = 0;
  RingPlace at;

  __device__ __forceinline__ XReader(const WgmmaParams& p, const WgBarriers& barriers, uint32_t shared, int k_group)
      : ring(shared + k_group * p.x_depth * kStage) {}

  // Wait for the next stage.
  __device__ __forceinline__ void open(const WgBarriers& barriers, int k_group) {
    barrier_wait(barriers.x(kSorted<TOKENS> ? 2 : 0, k_group, at.slot), at.parity);
    tile = kSwizzledRows | ((ring + at.slot * kStage) >> 4);
  }

  // Free the stage before the one just opened, whose last wgmma has ended.
  __device__ __forceinline__ void leave_last(const WgmmaParams& p, const WgBarriers& barriers, int k_group, int lane) {
    if (last != 0 && lane == 0) barrier_arrive(last);
    last = barriers.x(1, k_group, at.slot);
    at.next(p.x_depth);
  }
};

// Two k steps; returns when the two before are done, so that their registers, and the x that they read, are free.
template <int TOKENS>
__device__ __forceinline__ void multiply(float (&sums)[TOKENS / 2], const uint32_t (&above)[4], const uint32_t (&below)[4],
                                         uint64_t x_first, uint64_t x_second) {
  wgmma_fence();
  const uint32_t first[4] = {above[0], below[0], above[1], below[1]};
  const uint32_t second[4] = {above[2], below[2], above[3], below[3]};
  Wgmma<TOKENS>::run(sums, first, x_first);
  Wgmma<TOKENS>::run(sums, second, x_second);
  wgmma_commit();
  wgmma_wait<1>();
}

// One warpgroup's share of K, x sorted: decode and multiply.
template <Format FORMAT, int TOKENS>
__device__ __forceinline__ void consume_sorted(const WgmmaParams& p, uint8_t* shared, const WgBarriers& barriers, int group,
                                        int k_group, int stages, int warp, int lane, float (&sums)[TOKENS / 2]) {
  constexpr int kRow = WgScales<FORMAT>::kRow, kBox = TOKENS * kBlockK * 2;
  const int g = lane >> 2, q = lane & 3;
  const uint32_t base = shared_address(shared), lane_row = warp * 16 + g;
  const uint32_t codes0 =
      opaque(base + p.codes_offset + group * p.depth * kWgTileBytes + lane_row * kLine + ((q ^ g) << 4));
  const uint32_t scales0 = opaque(base + p.scales_offset + group * p.depth * WgScales<FORMAT>::kTile + lane_row * kRow +
                                  q * (kRow / 8));
  RingPlace at;
  XReader<TOKENS> x(p, barriers, base, k_group);
  stages = opaque(stages);
#pragma unroll 1
  for (; stages > 0; --stages) {
    barrier_wait(barriers.weights(0, group, at.slot), at.parity);
    const uint32_t codes = codes0 + at.slot * kWgTileBytes;
    uint32_t scales = scales0 + at.slot * WgScales<FORMAT>::kTile;
    uint4 low, high;                 // this lane's 32 codes of the next 128 k, rows g and g + 8,
    uint32_t bytes_low, bytes_high;  // and their block scales
    const auto load = [&](uint32_t half) {  // piece c of row r lies at c ^ (r & 7)
      low = load_piece(codes ^ half);
      high = load_piece((codes ^ half) + 8 * kLine);
      bytes_low = FORMAT == Format::kNvfp4 ? load_half(scales) : load_byte(scales);
      bytes_high = FORMAT == Format::kNvfp4 ? load_half(scales + 8 * kRow) : load_byte(scales + 8 * kRow);
    };
    load(0);
#pragma unroll 1
    for (uint32_t half = 0; half < kLine; half += kLine / 2) {  // half a line: 128 k
      uint32_t lifted[2];  // rows g and g + 8 for the first 16 of 32 k, and for the others
      if constexpr (FORMAT == Format::kNvfp4) {
        const uint32_t bytes = bytes_low | bytes_high << 16;
        lift_e4m3(bytes, lifted);
        if (__any_sync(~0u, special_e4m3(bytes))) convert_e4m3(bytes, lifted);
      } else {
        lifted[0] = lifted[1] = lift_e8m0x2(bytes_low | bytes_high << 8);
      }
      const bool fresh = half % (kXBlocks<TOKENS> * (kLine / kStageBlocks)) == 0;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        uint32_t above[4], below[4];
        const uint32_t word_low = word_at(low, w), word_high = word_at(high, w);
        if (w == 3 && half == 0) {
          scales += kRow / 2;
          load(kLine / 2);
        }
        decode_scaled<FORMAT>(word_low, lifted[w / 2], lifted[w / 2], false, above);
        decode_scaled<FORMAT>(word_high, lifted[w / 2], lifted[w / 2], true, below);
        if (w == 0 && fresh) x.open(barriers, k_group);
        multiply<TOKENS>(sums, above, below, x.tile + w * 2, x.tile + (kBox >> 4) + w * 2);
        if (w == 0 && fresh) x.leave_last(p, barriers, k_group, lane);
      }
      x.tile += 2 * kBox >> 4;
    }
    barrier_arrive(barriers.weights(1, group, at.slot));  // every lane: racecheck takes an arrival for that lane's alone
    at.next(p.depth);
  }
  wgmma_wait<0>();
}

// One warpgroup's share of K, x as it is: gather, decode and multiply.
template <Format FORMAT, int TOKENS>
__device__ __forceinline__ void consume_gathered(const WgmmaParams& p, uint8_t* shared, const WgBarriers& barriers, int group,
                                        int k_group, int stages, int warp, int lane, float (&sums)[TOKENS / 2]) {
  constexpr int kRow = WgScales<FORMAT>::kRow, kBox = TOKENS * kBlockK * 2;
  const int g = lane >> 2, q = lane & 3;
  const uint32_t select = opaque(q | (q + 4) << 4);  // byte q of two words
  const uint32_t base = shared_address(shared), lane_row = warp * 16 + g;
  const uint32_t codes0 = opaque(base + p.codes_offset + group * p.depth * kWgTileBytes + lane_row * kLine + g * 16);
  const uint32_t scales0 = opaque(base + p.scales_offset + group * p.depth * WgScales<FORMAT>::kTile + lane_row * kRow);
  RingPlace at;
  XReader<TOKENS> x(p, barriers, base, k_group);
  stages = opaque(stages);
#pragma unroll 1
  for (; stages > 0; --stages) {
    barrier_wait(barriers.weights(0, group, at.slot), at.parity);
    const uint32_t codes = codes0 + at.slot * kWgTileBytes;
    uint32_t scales = scales0 + at.slot * WgScales<FORMAT>::kTile;
    bool special = false;
    if constexpr (FORMAT == Format::kNvfp4) {  // the four lanes of a row share the search
      special = __any_sync(~0u, special_e4m3(load_word(scales + q * 4)) | special_e4m3(load_word(scales + q * 4 + 8 * kRow)));
    }
    uint4 low[2], high[2];           // the next 64 k of rows g and g + 8: two pieces of 32 k,
    uint32_t bytes_low, bytes_high;  // and their block scales
    const auto load = [&](uint32_t chunk) {  // piece c of row r lies at c ^ (r & 7)
      const uint32_t first = codes ^ chunk, second = first ^ 16;
      low[0] = load_piece(first);
      high[0] = load_piece(first + 8 * kLine);
      bytes_low = FORMAT == Format::kNvfp4 ? load_word(scales) : load_half(scales);
      bytes_high = FORMAT == Format::kNvfp4 ? load_word(scales + 8 * kRow) : load_half(scales + 8 * kRow);
      low[1] = load_piece(second);
      high[1] = load_piece(second + 8 * kLine);
    };
    load(0);
#pragma unroll 1
    for (uint32_t chunk = 0; chunk < kLine; chunk += 32) {  // 32 bytes of a line: 64 k
      const auto gather = [select](const uint4& v) {
        return permute_bytes(permute_bytes(v.x, v.y, select), permute_bytes(v.z, v.w, select), 0x5410);
      };
      const uint32_t mine_low[2] = {gather(low[0]), gather(low[1])}, mine_high[2] = {gather(high[0]), gather(high[1])};
      uint32_t scale_low[2], scale_high[2];  // of 16 k each: lower halves for the first piece, upper for the second
      if constexpr (FORMAT == Format::kNvfp4) {
        lift_e4m3(bytes_low, scale_low);
        lift_e4m3(bytes_high, scale_high);
        if (special) {
          convert_e4m3(bytes_low, scale_low);
          convert_e4m3(bytes_high, scale_high);
        }
      } else {
        scale_low[0] = scale_low[1] = lift_e8m0x2(bytes_low);
        scale_high[0] = scale_high[1] = lift_e8m0x2(bytes_high);
      }
      scales += kRow / kStageBlocks;
      if (chunk + 32 < kLine) load(chunk + 32);
      const bool fresh = chunk % (kXBlocks<TOKENS> * 32) == 0;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t above[4], below[4];
        decode_scaled<FORMAT>(mine_low[j], scale_low[0], scale_low[1], j == 1, above);
        decode_scaled<FORMAT>(mine_high[j], scale_high[0], scale_high[1], j == 1, below);
        if (j == 0 && fresh) x.open(barriers, k_group);
        multiply<TOKENS>(sums, above, below, x.tile + j * 4, x.tile + j * 4 + 2);
        if (j == 0 && fresh) x.leave_last(p, barriers, k_group, lane);
      }
      x.tile += kBox >> 4;
    }
    barrier_arrive(barriers.weights(1, group, at.slot));  // every lane: racecheck takes an arrival for that lane's alone
    at.next(p.depth);
  }
  wgmma_wait<0>();
}

}  // namespace requant
