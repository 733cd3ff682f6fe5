// One stage's arithmetic: codes to halves, the MMAs, and the block scales' way into the sums.
#pragma once
#include "w4a16_x.cuh"

namespace requant {

// The FP32 sums of one warp: ROW_TILES x 16 rows by TOKENS, and the arithmetic of one stage.
template <Format FORMAT, int TOKENS, int ROW_TILES, int DEPTH, Alignment ALIGNMENT>
struct WarpTile {
  using Layout = Ring<FORMAT, ROW_TILES, DEPTH, ALIGNMENT>;
  static constexpr ScaleMode kMode = scale_mode<FORMAT, TOKENS>();
  static constexpr int kColumns = (TOKENS + 7) / 8;                   // n = 8 tiles
  static constexpr int kChains = kColumns * ROW_TILES <= 2 ? 2 : 1;   // independent accumulators hide MMA latency
  static constexpr bool kGroups = kMode == ScaleMode::kGroupColumns;
  static constexpr int kWordsPerGroup = FormatTraits<FORMAT>::kGroup / 8;
  static constexpr int kUnrollLines = 1;  // unrolling costs registers and instruction cache

  float sums[ROW_TILES][kGroups ? 1 : kColumns][kGroups ? 1 : kChains][4];
  float totals[ROW_TILES][4];  // dense kernel, up to 8 tokens: the sums of all stages, true to scale

  __device__ __forceinline__ void clear() {
    float* all = &sums[0][0][0][0];
#pragma unroll
    for (unsigned i = 0; i < sizeof(sums) / sizeof(float); ++i) all[i] = 0.0f;
  }

  __device__ __forceinline__ void clear_totals() {
#pragma unroll
    for (int i = 0; i < ROW_TILES * 4; ++i) totals[i / 4][i % 4] = 0.0f;
  }

  // The sums of one stage join the totals; restore[token] undoes the scale of the stage's x.
  __device__ __forceinline__ void add_stage(const float* restore, int lane) {
    static_assert(TOKENS > 8 || kColumns == 1);
    float2 of = make_float2(restore[0], 0.0f);
    if (TOKENS > 1) of = *reinterpret_cast<const float2*>(restore + (kGroups ? 0 : 2 * (lane & 3) & (TOKENS - 1)));
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float v = sums[r][0][0][i];
        if (!kGroups && kMode != ScaleMode::kScaleAfter && kChains == 2) v += sums[r][0][kChains - 1][i];
        totals[r][i] += v * (i % 2 == 0 ? of.x : of.y);
      }
    }
  }

  // Put the totals into to[token][row].
  __device__ __forceinline__ void put_totals(float* to, int pitch, int lane) const {
    const int g = lane >> 2, p = lane & 3;
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = r * 16 + g + i / 2 * 8, token = kGroups ? i % 2 : 2 * p + i % 2;
        float v = totals[r][i];
        if (kGroups) {
          if (i % 2 >= TOKENS) continue;
          v += __shfl_xor_sync(~0u, v, 1);
          v += __shfl_xor_sync(~0u, v, 2);
        }
        if (kGroups ? p == 0 : token < TOKENS) to[token * pitch + row] = v;
      }
    }
  }

  // Bytes at..at+3 of a row's block scales of this stage, zero past the row's end (where the copy has not seen to that).
  template <bool MASK>
  __device__ static __forceinline__ uint32_t scale_word(const uint8_t* row, int at, int misaligned, int valid) {
    if constexpr (ALIGNMENT == Alignment::kGeneral) {
      const uint32_t* words = reinterpret_cast<const uint32_t*>(row + at);
      uint32_t word = __funnelshift_r(words[0], words[1], misaligned * 8);
      const int left = valid - at;
      if (left < 4) word = left <= 0 ? 0u : word & ((1u << (8 * left)) - 1u);
      return word;
    } else {
      const uint32_t word = *reinterpret_cast<const uint32_t*>(row + at);
      return MASK && at >= valid ? 0u : word;
    }
  }

  // Where a lane reads x: its token's pieces; with group columns, zeros unless column g is the lane's own.
  struct XSource {
    const uint8_t* at;
    int stride;  // to the next stage
  };
  __device__ static __forceinline__ XSource x_source(const uint8_t* x, const uint8_t* zeros, int lane) {
    const int g = lane >> 2, p = lane & 3, token = g % (kGroups ? TOKENS : TOKENS < 8 ? TOKENS : 8);
    if (kGroups && g / 2 != p) return {zeros, 0};
    return {x + token * 64 + p * kPiece, TOKENS * kStageXBytes};
  }

  // One stage: its codes in shared memory, the block scales of this lane's row and those SCALE_PITCH bytes per row on; `x`
  // is the lane's XSource at this stage.
  template <int SCALE_PITCH = Layout::kScalePitch>
  __device__ __forceinline__ void consume(const uint8_t* slot, const uint8_t* scale_row, const uint8_t* x, int lane,
                                          int misaligned, int valid) {
    const int g = lane >> 2, p = lane & 3;
    constexpr int kLineScales = FormatTraits<FORMAT>::kStageScales / kStageLines;
#pragma unroll kUnrollLines
    for (int line = 0; line < kStageLines; ++line) {
      const uint8_t* codes = slot + (line * Layout::kRows + g) * kLine;
      const uint8_t* scales = scale_row + line * kLineScales;
      if constexpr (kMode == ScaleMode::kScaleAfter) {
        consume_by_group<SCALE_PITCH>(codes, scales, x, g, p, misaligned, valid - line * kLineScales);
      } else {
        consume_by_lane<SCALE_PITCH>(codes, scales, x, g, p, misaligned, valid - line * kLineScales);
      }
      x += kGroups && g / 2 != p ? 0 : TOKENS * kLineXBytes;
    }
  }

 private:
  // kGroupColumns and kScaleFirst: lane p owns k = 64p .. 64p+63 of the line.
  template <int SCALE_PITCH>
  __device__ __forceinline__ void consume_by_lane(const uint8_t* codes, const uint8_t* scales, const uint8_t* x, int g,
                                                  int p, int misaligned, int valid) {
    constexpr bool kMask = SCALE_PITCH != Layout::kScalePitch && ALIGNMENT != Alignment::kScale16;
    uint32_t scale[ROW_TILES][2];  // this lane's block scales, rows g and g + 8
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint8_t* row = scales + (r * 16 + h * 8) * SCALE_PITCH;
        if constexpr (FORMAT == Format::kNvfp4) {
          scale[r][h] = scale_word<kMask>(row, p * 4, misaligned, valid);
        } else {
          scale[r][h] = scale_word<kMask>(row, p / 2 * 4, misaligned, valid) >> (p % 2 * 16);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      uint4 line[ROW_TILES][2];
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int chunk = (2 * p + j) ^ g;
          line[r][h] = *reinterpret_cast<const uint4*>(codes + (r * 16 + h * 8) * kLine + chunk * 16);
        }
      }
      float dot[ROW_TILES][4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        uint4 b[kColumns];
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
          b[n] = *reinterpret_cast<const uint4*>(x + ((j * 4 + w) * TOKENS + n * 8) * 64);
        }
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
          uint32_t low[4], high[4];  // rows g and g + 8
          if constexpr (kMode == ScaleMode::kBf16) {
            decode_e2m1_bf16(word_of(line[r][0], w), low);
            decode_e2m1_bf16(word_of(line[r][1], w), high);
          } else {
            decode_e2m1(word_of(line[r][0], w), low);
            decode_e2m1(word_of(line[r][1], w), high);
          }
          if constexpr (kGroups) {
            const float zero[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            const uint32_t a0[4] = {low[0], high[0], low[1], high[1]}, a1[4] = {low[2], high[2], low[3], high[3]};
            if (w % kWordsPerGroup == 0) {
              mma_f16(dot[r], a0, b[0].x, b[0].y, zero);
            } else {
              mma_f16(dot[r], a0, b[0].x, b[0].y, dot[r]);
            }
            mma_f16(dot[r], a1, b[0].z, b[0].w, dot[r]);
            if (w % kWordsPerGroup == kWordsPerGroup - 1) {
              const int group = j * (4 / kWordsPerGroup) + w / kWordsPerGroup;
              const float of_low = group_scale(scale[r][0], group), of_high = group_scale(scale[r][1], group);
              sums[r][0][0][0] += of_low * dot[r][0];
              sums[r][0][0][2] += of_high * dot[r][2];
              if (TOKENS == 2) {
                sums[r][0][0][1] += of_low * dot[r][1];
                sums[r][0][0][3] += of_high * dot[r][3];
              }
            }
          } else if constexpr (kMode == ScaleMode::kBf16) {
            const __nv_bfloat162 two_low = decode_e4m3x2_bf16(j == 0 ? scale[r][0] : scale[r][0] >> 16);
            const __nv_bfloat162 two_high = decode_e4m3x2_bf16(j == 0 ? scale[r][1] : scale[r][1] >> 16);
            const __nv_bfloat162 of_low = w < 2 ? __low2bfloat162(two_low) : __high2bfloat162(two_low);
            const __nv_bfloat162 of_high = w < 2 ? __low2bfloat162(two_high) : __high2bfloat162(two_high);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              low[i] = multiply_bf162(low[i], of_low);
              high[i] = multiply_bf162(high[i], of_high);
            }
            const uint32_t a0[4] = {low[0], high[0], low[1], high[1]}, a1[4] = {low[2], high[2], low[3], high[3]};
#pragma unroll
            for (int n = 0; n < kColumns; ++n) mma_bf16(sums[r][n][0], a0, b[n].x, b[n].y, sums[r][n][0]);
#pragma unroll
            for (int n = 0; n < kColumns; ++n) {
              mma_bf16(sums[r][n][kChains - 1], a1, b[n].z, b[n].w, sums[r][n][kChains - 1]);
            }
          } else {
            const __half2 of_low = group_scale_half2(scale[r][0], j, w), of_high = group_scale_half2(scale[r][1], j, w);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              low[i] = multiply_half2(low[i], of_low);
              high[i] = multiply_half2(high[i], of_high);
            }
            const uint32_t a0[4] = {low[0], high[0], low[1], high[1]}, a1[4] = {low[2], high[2], low[3], high[3]};
#pragma unroll
            for (int n = 0; n < kColumns; ++n) mma_f16(sums[r][n][0], a0, b[n].x, b[n].y, sums[r][n][0]);
#pragma unroll
            for (int n = 0; n < kColumns; ++n) {
              mma_f16(sums[r][n][kChains - 1], a1, b[n].z, b[n].w, sums[r][n][kChains - 1]);
            }
          }
        }
      }
    }
  }

  // kScaleAfter: in group c of 32 k, lane p owns k = 32c + 8p .. 32c + 8p+7.
  template <int SCALE_PITCH>
  __device__ __forceinline__ void consume_by_group(const uint8_t* codes, const uint8_t* scales, const uint8_t* x, int g,
                                                   int p, int misaligned, int valid) {
    constexpr bool kMask = SCALE_PITCH != Layout::kScalePitch && ALIGNMENT != Alignment::kScale16;
    const float zero[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int quarter = 0; quarter < 2; ++quarter) {
      uint32_t scale[ROW_TILES][2];
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          scale[r][h] =
              scale_word<kMask>(scales + (r * 16 + h * 8) * SCALE_PITCH, quarter * 4, misaligned, valid);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int c = quarter * 4 + i;
        uint4 b[kColumns];
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
          b[n] = *reinterpret_cast<const uint4*>(x + (c * TOKENS + n * 8) * 64);
        }
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
          uint32_t low[4], high[4];
          const uint8_t* at = codes + r * 16 * kLine + ((c ^ g) * 16) + p * 4;
          decode_e2m1(*reinterpret_cast<const uint32_t*>(at), low);
          decode_e2m1(*reinterpret_cast<const uint32_t*>(at + 8 * kLine), high);
          const float of_low = decode_e8m0((scale[r][0] >> (8 * i)) & 0xFFu);
          const float of_high = decode_e8m0((scale[r][1] >> (8 * i)) & 0xFFu);
          const uint32_t a0[4] = {low[0], high[0], low[1], high[1]}, a1[4] = {low[2], high[2], low[3], high[3]};
#pragma unroll
          for (int n = 0; n < kColumns; ++n) {
            float dot[4];
            mma_f16(dot, a0, b[n].x, b[n].y, zero);
            mma_f16(dot, a1, b[n].z, b[n].w, dot);
            sums[r][n][0][0] += of_low * dot[0];
            sums[r][n][0][1] += of_low * dot[1];
            sums[r][n][0][2] += of_high * dot[2];
            sums[r][n][0][3] += of_high * dot[3];
          }
        }
      }
    }
  }

  __device__ static __forceinline__ uint32_t word_of(const uint4& v, int w) {
    return w == 0 ? v.x : w == 1 ? v.y : w == 2 ? v.z : v.w;
  }

  __device__ static __forceinline__ float group_scale(uint32_t word, int group) {
    if constexpr (FORMAT == Format::kNvfp4) {
      const __half2 two = decode_e4m3x2(group < 2 ? word : word >> 16);
      return group % 2 ? __high2float(two) : __low2float(two);
    } else {
      return decode_e8m0((word >> (8 * group)) & 0xFFu);
    }
  }

  __device__ static __forceinline__ __half2 group_scale_half2(uint32_t word, int j, int w) {
    const __half2 two = decode_e4m3x2(j == 0 ? word : word >> 16);
    return w < 2 ? __low2half2(two) : __high2half2(two);
  }

 public:
  // Put the sums, true to scale, into totals[token][row]; `add` to what is there for a later chunk of K.
  __device__ __forceinline__ void flush(float* totals, int pitch, const uint32_t* largest, int lane, bool add) {
    using X = Activations<kMode, TOKENS == 1>;
    const int g = lane >> 2, p = lane & 3;
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
      if constexpr (kGroups) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int token = i % 2, row = r * 16 + g + i / 2 * 8;
          if (token >= TOKENS) continue;
          float v = sums[r][0][0][i];
          v += __shfl_xor_sync(~0u, v, 1);
          v += __shfl_xor_sync(~0u, v, 2);
          if (p == 0) put(totals + token * pitch + row, v * X::restore(largest[token]), add);
        }
      } else {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
          if (TOKENS < 8 && 2 * p >= TOKENS) continue;
          const float restore[2] = {X::restore(largest[n * 8 + 2 * p]), X::restore(largest[n * 8 + 2 * p + 1])};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int token = n * 8 + 2 * p + i % 2, row = r * 16 + g + i / 2 * 8;
            float v = sums[r][n][0][i];
            if (kMode != ScaleMode::kScaleAfter && kChains == 2) v += sums[r][n][1][i];
            put(totals + token * pitch + row, v * restore[i % 2], add);
          }
        }
      }
    }
  }

 private:
  __device__ static __forceinline__ void put(float* at, float v, bool add) { *at = add ? *at + v : v; }
};

}  // namespace requant
