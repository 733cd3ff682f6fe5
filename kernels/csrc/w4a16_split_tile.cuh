// The parts of w4a16_split.cuh that a lane holds: where its codes and block scales lie in a tile, and its x.
#pragma once
#include "w4a16_stream_copies.cuh"
#include "w4a16_x.cuh"

namespace requant {

// A tile of 16 rows of K = 192 WARPS in shared memory, as in memory.
template <Format FORMAT, int WARPS>
struct SplitTile {
  static constexpr int kSliceK = 192, kSliceBytes = kSliceK / 2, kSliceScales = kSliceK / FormatTraits<FORMAT>::kGroup;
  static constexpr int kK = kSliceK * WARPS, kRowBytes = kSliceBytes * WARPS, kRowScales = kSliceScales * WARPS;
  static_assert(kRowBytes % 64 == 32);  // so that four rows lie in the four quarters of the banks
  static constexpr int kCodes = kTileRows * kRowBytes, kScales = kTileRows * kRowScales;
  static constexpr int kSums = WARPS * 32 * 16;  // [warp][lane], four each
  static constexpr int kSlotBytes = kCodes + kScales + kSums;
  static_assert(kCodes % 16 == 0 && kScales % 16 == 0);
};

// How a warp's slice of K falls to its lanes. SPAN lanes share a group of 16 k, and 2 SPAN tokens fit into the columns of B:
// column 2 SPAN i + t holds token t in the rows of lanes SPAN i .. SPAN (i + 1) - 1, and zeros elsewhere.
template <int SPAN>
struct SplitLane {
  static constexpr int kTokens = 2 * SPAN, kGroups = 3 * SPAN, kWords = 2 / SPAN;  // groups of a lane, its words of 8 k in each
  const int g, p;

  __device__ __forceinline__ explicit SplitLane(int lane) : g(lane >> 2), p(lane & 3) {}
  // Of the lane's column in B; its two columns of the sums are first_token() and the next one.
  __device__ __forceinline__ int token() const { return g % kTokens; }
  __device__ __forceinline__ bool owns_column() const { return g / kTokens == p / SPAN; }
  __device__ __forceinline__ int first_token() const { return 2 * p % kTokens; }
  // The lane's first word in the slice; its others are word + w + 2 j, w < kWords, j < kGroups.
  __device__ __forceinline__ int word() const { return p / SPAN * kGroups * 2 + p % SPAN; }
};

// A warp's x for the tokens of one segment, as decode_e2m1 orders it: halves times a power of two, the warp's own per token.
template <int SPAN>
struct SplitX {
  using Lane = SplitLane<SPAN>;
  uint4 at[Lane::kGroups][Lane::kWords];
  float restore[2];  // what undoes it, for the lane's columns of the sums

  template <class Tile>
  __device__ __forceinline__ void load(const Params& p, const Segment& s, int warp, const Lane& lane) {
    using X = Activations<ScaleMode::kGroupColumns, false>;
    const int token = lane.token();
    const bool present = lane.owns_column() && token < s.tokens;
    const uint4* from = nullptr;
    if (present) {
      const int row = token == 0 ? x_row(p, make_int4(0, 0, 0, s.first_number)) : __ldg(p.x_rows + s.first_slot + token);
      from = reinterpret_cast<const uint4*>(p.x + static_cast<size_t>(row) * Tile::kK + warp * Tile::kSliceK) + lane.word();
    }
    uint32_t most = 0;
#pragma unroll
    for (int j = 0; j < Lane::kGroups; ++j) {
#pragma unroll
      for (int w = 0; w < Lane::kWords; ++w) {
        at[j][w] = present ? __ldg(from + 2 * j + w) : make_uint4(0, 0, 0, 0);
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
template <Format FORMAT, int SPAN>
struct SplitScales {
  static constexpr int kGroups = SplitLane<SPAN>::kGroups;
  // Bytes from the slice's beginning. NVFP4: two words, and the bits before the first scale (the last lane's three lie in one
  // word: what follows is another row's). MXFP4, a byte for two groups: the first byte, and whether one begins in its middle.
  const int first, second, shift;

  __device__ __forceinline__ explicit SplitScales(int p)
      : first(FORMAT == Format::kNvfp4 ? group(p) / 4 * 4 : group(p) / 2), second(opaque(min(first + 4, 8))),
        shift(opaque(FORMAT == Format::kNvfp4 ? group(p) % 4 * 8 : group(p) % 2)) {}

  __device__ __forceinline__ void read(const uint8_t* low_row, const uint8_t* high_row, float (&low)[kGroups],
                                       float (&high)[kGroups]) const {
    if constexpr (FORMAT == Format::kMxfp4) {
      read_pairs(low_row, low);
      read_pairs(high_row, high);
    } else {
      const uint2 a = words(low_row), b = words(high_row);
      two(a.x, low[0], low[1]);
      two(b.x, high[0], high[1]);
      if constexpr (SPAN == 1) {
        two(__byte_perm(a.x, b.x, 0x0062), low[2], high[2]);
      } else {
        two(a.x >> 16, low[2], low[3]);
        two(b.x >> 16, high[2], high[3]);
        two(a.y, low[4], low[5]);
        two(b.y, high[4], high[5]);
      }
    }
  }

 private:
  __device__ static __forceinline__ int group(int p) { return p / SPAN * kGroups; }

  __device__ __forceinline__ uint2 words(const uint8_t* row) const {
    const uint32_t a = *reinterpret_cast<const uint32_t*>(row + first), b = *reinterpret_cast<const uint32_t*>(row + second);
    return make_uint2(__funnelshift_r(a, b, shift), b >> shift);
  }

  __device__ static __forceinline__ void two(uint32_t bytes, float& a, float& b) {
    const float2 v = __half22float2(decode_e4m3x2(bytes));
    a = v.x;
    b = v.y;
  }

  __device__ __forceinline__ void read_pairs(const uint8_t* row, float (&to)[kGroups]) const {
    if constexpr (SPAN == 1) {
      to[0] = decode_e8m0(row[first]);
      to[2] = decode_e8m0(row[first + 1]);
      to[1] = shift ? to[2] : to[0];
    } else {
#pragma unroll
      for (int j = 0; j < kGroups; j += 2) to[j] = to[j + 1] = decode_e8m0(row[first + j / 2]);
    }
  }
};

}  // namespace requant
