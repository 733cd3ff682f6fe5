// The parts of w4a16_split.cuh that a lane holds: where its codes and block scales lie in a tile, and its x.
#pragma once
#include "w4a16_stream_copies.cuh"
#include "w4a16_x.cuh"

namespace requant {

// A tile of 16 rows of K = 64 STEPS WARPS in shared memory. The rows lie as in memory where that leaves reads without bank
// conflicts, i.e. where four rows of codes begin in the four quarters of the banks; else they are padded to that, by boxes of
// the copy engine that are wider than the row. A box holds 2048 bytes of a row at most, so long rows come in two parts.
template <Format FORMAT, int STEPS, int WARPS>
struct SplitTile {
  static_assert(STEPS == 3 || STEPS == 4);  // SplitLane and SplitScales know no other
  static constexpr int kSliceK = 64 * STEPS, kSliceBytes = kSliceK / 2, kSliceScales = kSliceK / FormatTraits<FORMAT>::kGroup;
  static constexpr int kK = kSliceK * WARPS, kRowBytes = kSliceBytes * WARPS, kRowScales = kSliceScales * WARPS;
  static constexpr bool kWhole = kRowBytes % 64 == 32;  // a tile is one run of bytes
  static constexpr int kParts = kWhole || kRowBytes < 2048 ? 1 : 2, kPartWarps = WARPS / kParts;
  static constexpr int kPitch = kWhole ? kRowBytes : kRowBytes / kParts + 32;
  static constexpr int kScalePitch = kWhole ? kRowScales : kRowScales + 16;
  static constexpr int kCodes = kParts * kTileRows * kPitch, kScales = kTileRows * kScalePitch;
  __device__ static __forceinline__ int slice(int warp) {  // where a warp's codes begin in the first row
    return kParts == 1 ? warp * kSliceBytes : warp / kPartWarps * kTileRows * kPitch + warp % kPartWarps * kSliceBytes;
  }
  static constexpr int kSums = WARPS * 32 * 16;  // [warp][lane], four each
  static constexpr int kSlotBytes = kCodes + kScales + kSums;
  static constexpr int kRowUnits = kRowBytes / 8 / kParts;  // of a part, as the tensor map counts
  static_assert(kPitch % 64 == 32 && kCodes % 16 == 0 && kScales % 16 == 0);
  static_assert(kWhole || (kCodes % 128 == 0 && kScales % 128 == 0 && kRowScales % 32 == 0 && kPitch <= 2048));
};

// How a warp's slice of K falls to its lanes. SPAN lanes share a group of 16 k, and 2 SPAN tokens fit into the columns of B:
// column 2 SPAN i + t holds token t in the rows of lanes SPAN i .. SPAN (i + 1) - 1, and zeros elsewhere.
template <int STEPS, int SPAN>
struct SplitLane {
  static constexpr int kTokens = 2 * SPAN, kWords = 2 / SPAN;  // words of 8 k that a lane reads of a group
  static constexpr int kGroups = STEPS * SPAN;                 // of a lane: neighbours
  const int g, p;
  // In which order it takes them, j ^ flip: so that the groups of four lanes differ modulo 4, where three are free of that.
  const int flip;

  __device__ __forceinline__ explicit SplitLane(int lane)
      : g(lane >> 2), p(lane & 3), flip(STEPS % 2 != 0 ? 0 : SPAN == 1 && STEPS == 4 ? lane & 3 : lane >> 1 & 1) {}
  // Of the lane's column in B; its two columns of the sums are first_token() and the next one.
  __device__ __forceinline__ int token() const { return g % kTokens; }
  __device__ __forceinline__ bool owns_column() const { return g / kTokens == p / SPAN; }
  __device__ __forceinline__ int first_token() const { return 2 * p % kTokens; }
  __device__ __forceinline__ int first_group() const { return p / SPAN * kGroups; }
  // The lane's first word of group j (before it is flipped) in the slice.
  __device__ __forceinline__ int word(int j) const { return 2 * (first_group() + (j ^ flip)) + p % SPAN; }
};

// A warp's x for the tokens of one segment, as decode_e2m1 orders it: halves times a power of two, the warp's own per token.
template <int STEPS, int SPAN>
struct SplitX {
  using Lane = SplitLane<STEPS, SPAN>;
  uint4 at[Lane::kGroups][Lane::kWords];
  float restore[2];  // what undoes it, for the lane's columns of the sums

  template <class Tile>
  __device__ __forceinline__ void load(const Params& p, const Segment& s, int warp, const Lane& lane, bool settled) {
    using X = Activations<ScaleMode::kGroupColumns, false>;
    const int token = lane.token();
    const bool present = lane.owns_column() && token < s.tokens;
    const uint4* from = nullptr;
    if (present) {
      const int row = token == 0 ? x_row(p, make_int4(0, 0, 0, s.first_number)) : load_fresh(settled, p.x_rows + s.first_slot + token);
      from = reinterpret_cast<const uint4*>(p.x + static_cast<size_t>(row) * Tile::kK + warp * Tile::kSliceK);
    }
    uint32_t most = 0;
#pragma unroll
    for (int j = 0; j < Lane::kGroups; ++j) {
#pragma unroll
      for (int w = 0; w < Lane::kWords; ++w) {
        at[j][w] = present ? from[lane.word(j) + w] : make_uint4(0, 0, 0, 0);
      }
    }
#pragma unroll
    for (int j = 0; j < Lane::kGroups; ++j) {
#pragma unroll
      for (int w = 0; w < Lane::kWords; ++w) {
        const uint4 v = at[j][w];
        const uint32_t a = __vmaxu2(v.x & 0x7FFF7FFFu, v.y & 0x7FFF7FFFu);
        const uint32_t b = __vmaxu2(v.z & 0x7FFF7FFFu, v.w & 0x7FFF7FFFu);
        most = __vmaxu2(most, __vmaxu2(a, b));
      }
    }
    most = max(most & 0xFFFFu, most >> 16);
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) {  // over all lanes whose column is of the same token
      if (bit < 4 || bit >= 4 * Lane::kTokens) most = max(most, __shfl_xor_sync(~0u, most, bit));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) restore[i] = X::restore(__shfl_sync(~0u, most, 4 * (lane.first_token() + i)));
    const float factor = __uint_as_float(static_cast<uint32_t>(X::shift_for(most)) << 23);
#pragma unroll
    for (int j = 0; j < Lane::kGroups; ++j) {
#pragma unroll
      for (int w = 0; w < Lane::kWords; ++w) at[j][w] = X::to_halves(at[j][w], factor);
    }
  }
};

// The block scales of a lane's groups, in rows g and g + 8.
template <Format FORMAT, int STEPS, int SPAN>
struct SplitScales {
  using Lane = SplitLane<STEPS, SPAN>;
  static constexpr int kGroups = Lane::kGroups;
  // NVFP4, three steps: two words of the slice, and the bits before the first scale (the last lane's three lie in one word:
  // what follows is another row's). Else the lane's bytes are aligned, and `order` takes them to the order of the steps.
  // MXFP4, a byte for two groups: the first byte, and for three steps whether a group begins in its middle.
  const int first, second, order;

  __device__ __forceinline__ explicit SplitScales(const Lane& lane)
      : first(FORMAT == Format::kMxfp4 ? lane.first_group() / 2 : STEPS == 3 ? lane.first_group() / 4 * 4 : lane.first_group()),
        second(opaque(STEPS == 3 ? min(first + 4, 8) : 0)),
        order(opaque(FORMAT == Format::kMxfp4 ? (STEPS == 3 ? lane.first_group() % 2 : SPAN == 1 ? lane.flip >> 1 : 0)
                     : STEPS == 3             ? lane.first_group() % 4 * 8
                                              : 0x3210 ^ 0x1111 * lane.flip)) {}

  __device__ __forceinline__ void read(const uint8_t* low_row, const uint8_t* high_row, float (&low)[kGroups],
                                       float (&high)[kGroups]) const {
    if constexpr (FORMAT == Format::kMxfp4) {
      read_pairs(low_row, low);
      read_pairs(high_row, high);
    } else {
      const uint2 a = words(low_row), b = words(high_row);
      two(a.x, low[0], low[1]);
      two(b.x, high[0], high[1]);
      if constexpr (kGroups == 3) {
        two(__byte_perm(a.x, b.x, 0x0062), low[2], high[2]);
      } else {
        two(a.x >> 16, low[2], low[3]);
        two(b.x >> 16, high[2], high[3]);
      }
      if constexpr (SPAN == 2) {
        two(a.y, low[4], low[5]);
        two(b.y, high[4], high[5]);
      }
      if constexpr (kGroups == 8) {
        two(a.y >> 16, low[6], low[7]);
        two(b.y >> 16, high[6], high[7]);
      }
    }
  }

 private:
  __device__ __forceinline__ uint2 words(const uint8_t* row) const {
    if constexpr (STEPS == 3) {
      const uint32_t a = *reinterpret_cast<const uint32_t*>(row + first), b = *reinterpret_cast<const uint32_t*>(row + second);
      return make_uint2(__funnelshift_r(a, b, order), b >> order);
    } else if constexpr (SPAN == 1) {
      return make_uint2(__byte_perm(*reinterpret_cast<const uint32_t*>(row + first), 0, order), 0);
    } else {
      const uint2 a = *reinterpret_cast<const uint2*>(row + first);
      return make_uint2(__byte_perm(a.x, 0, order), __byte_perm(a.y, 0, order));
    }
  }

  __device__ static __forceinline__ void two(uint32_t bytes, float& a, float& b) {
    const float2 v = __half22float2(decode_e4m3x2(bytes));
    a = v.x;
    b = v.y;
  }

  __device__ __forceinline__ void read_pairs(const uint8_t* row, float (&to)[kGroups]) const {
    if constexpr (kGroups == 3) {
      to[0] = decode_e8m0(row[first]);
      to[2] = decode_e8m0(row[first + 1]);
      to[1] = order ? to[2] : to[0];
    } else if constexpr (SPAN == 1) {
      to[0] = to[1] = decode_e8m0(row[first + order]);
      to[2] = to[3] = decode_e8m0(row[first + 1 - order]);
    } else {
#pragma unroll
      for (int j = 0; j < kGroups; j += 2) to[j] = to[j + 1] = decode_e8m0(row[first + j / 2]);
    }
  }
};

}  // namespace requant
