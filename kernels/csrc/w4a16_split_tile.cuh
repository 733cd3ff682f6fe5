// The parts of w4a16_split.cuh that a lane holds: where its codes, block scales and sums lie in a tile, and its x.
#pragma once
#include "w4a16_stream_copies.cuh"
#include "w4a16_x.cuh"

namespace requant {

template <Format FORMAT, int STEPS, int WARPS>
struct SplitTile {
  static_assert(STEPS == 3);  // group_of and SplitScales count on it
  static constexpr int kSliceK = 64 * STEPS, kSliceBytes = kSliceK / 2, kSliceScales = kSliceK / FormatTraits<FORMAT>::kGroup;
  static constexpr int kK = kSliceK * WARPS, kRowBytes = kSliceBytes * WARPS, kRowScales = kSliceScales * WARPS;
  static_assert(kRowBytes % 64 == 32);  // rows lie so that reads are free of bank conflicts
  static constexpr int kCodes = kTileRows * kRowBytes, kScales = kTileRows * kRowScales, kSlotBytes = kCodes + kScales;
  static_assert(kCodes % 16 == 0 && kScales % 16 == 0);

  // Which group of 16 k of the warp's slice lane p takes in step j.
  __host__ __device__ static constexpr int group_of(int p, int j) { return STEPS * p + j; }

  // Where a lane's sums lie: 16 aligned bytes of the codes that it alone has read.
  __device__ static __forceinline__ int sums_at(int lane) {
    return (lane >> 2) * kRowBytes + ((lane & 3) * STEPS * 8 + 15) / 16 * 16;
  }
};

// A warp's x for the tokens of one segment: [pair of tokens][step][word of 8 k], as decode_e2m1 orders them.
template <int PAIRS, int STEPS>
struct SplitX {
  uint4 at[PAIRS][STEPS][2];
  float restore[PAIRS][2];

  template <class Tile>
  __device__ __forceinline__ void load(const Params& p, const Segment& s, int warp, int lane) {
    using X = Activations<ScaleMode::kGroupColumns, false>;
    const int g = lane >> 2, mine = lane & 3;
#pragma unroll
    for (int u = 0; u < PAIRS; ++u) {
      const int token = 2 * u + (g & 1);
      const bool present = g / 2 == mine && token < s.tokens;
      const __nv_bfloat16* from = p.x;
      if (present) {
        const int row = token == 0 ? x_row(p, make_int4(0, 0, 0, s.first_number)) : __ldg(p.x_rows + s.first_slot + token);
        from += static_cast<size_t>(row) * Tile::kK + warp * Tile::kSliceK;
      }
      uint32_t most = 0;
#pragma unroll
      for (int j = 0; j < STEPS; ++j) {
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          uint4& v = at[u][j][w];
          v = make_uint4(0, 0, 0, 0);
          if (present) v = __ldg(reinterpret_cast<const uint4*>(from + Tile::group_of(mine, j) * 16 + w * 8));
        }
      }
#pragma unroll
      for (int j = 0; j < STEPS; ++j) {
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          const uint4 v = at[u][j][w];
          const uint32_t a = __vmaxu2(v.x & 0x7FFF7FFFu, v.y & 0x7FFF7FFFu), b = __vmaxu2(v.z & 0x7FFF7FFFu, v.w & 0x7FFF7FFFu);
          most = __vmaxu2(most, __vmaxu2(a, b));
        }
      }
      most = max(most & 0xFFFFu, most >> 16);
      const uint32_t first = __reduce_max_sync(~0u, g & 1 ? 0u : most), second = __reduce_max_sync(~0u, g & 1 ? most : 0u);
      restore[u][0] = X::restore(first);
      restore[u][1] = X::restore(second);
      const float factor = __uint_as_float(static_cast<uint32_t>(X::shift_for(g & 1 ? second : first)) << 23);
#pragma unroll
      for (int j = 0; j < STEPS; ++j) {
#pragma unroll
        for (int w = 0; w < 2; ++w) at[u][j][w] = X::to_halves(at[u][j][w], factor);
      }
    }
  }
};

// A lane's block scales: those of its three groups, in rows g and g + 8.
template <Format FORMAT>
struct SplitScales {
  const int first, second, shift;  // bytes from the slice's beginning in a row; how the wanted ones are found there

  // NVFP4: bytes 3p .. 3p + 2 of 12, in two words (the last lane's second is not looked at). MXFP4: a byte is for two groups,
  // and lane p's three begin in the middle of one if p is odd.
  __device__ __forceinline__ explicit SplitScales(int p)
      : first(FORMAT == Format::kNvfp4 ? 3 * p / 4 * 4 : 3 * p / 2),
        second(FORMAT == Format::kNvfp4 ? min(3 * p / 4 * 4 + 4, 8) : 3 * p / 2 + 1),
        shift(FORMAT == Format::kNvfp4 ? 3 * p % 4 * 8 : p & 1) {}

  __device__ __forceinline__ void read(const uint8_t* low_row, const uint8_t* high_row, float (&low)[3], float (&high)[3]) const {
    if constexpr (FORMAT == Format::kNvfp4) {
      const uint32_t a = word(low_row), b = word(high_row);
      const float2 of_low = __half22float2(decode_e4m3x2(a)), of_high = __half22float2(decode_e4m3x2(b));
      const float2 last = __half22float2(decode_e4m3x2(__byte_perm(a, b, 0x0062)));
      low[0] = of_low.x, low[1] = of_low.y, low[2] = last.x;
      high[0] = of_high.x, high[1] = of_high.y, high[2] = last.y;
    } else {
      low[0] = decode_e8m0(low_row[first]), low[2] = decode_e8m0(low_row[second]);
      high[0] = decode_e8m0(high_row[first]), high[2] = decode_e8m0(high_row[second]);
      low[1] = shift ? low[2] : low[0];
      high[1] = shift ? high[2] : high[0];
    }
  }

 private:
  __device__ __forceinline__ uint32_t word(const uint8_t* row) const {
    return __funnelshift_r(*reinterpret_cast<const uint32_t*>(row + first), *reinterpret_cast<const uint32_t*>(row + second),
                           shift);
  }
};

}  // namespace requant
