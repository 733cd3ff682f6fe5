// MXFP4 -> NVFP4, the loops over blocks: kernels/repack_jit.py once more, decision for decision, in integers.
//
// Most 32-blocks take the short way: their scale 2^p has p in [-6, 8], the codes pass unchanged, and all that is asked of
// them is whether any magnitude is nonzero. The rest (shifts and least-squares fits) is gathered first.
// The rules compile for the host too; the kernels are below them.
#pragma once
#include <stddef.h>
#include <stdlib.h>

#include "fp4_mma.cuh"

namespace requant {

constexpr int REPACK_UNROLL = 4;  // blocks a thread has in flight
constexpr int CENSUS_UNROLL = 2;
constexpr int LOSSY_PER_THREAD = 16;
constexpr int E8M0_BIAS = 127;
constexpr unsigned DEAD_BYTE = 0x08;  // 2^-6: a scale that no kernel flushes
constexpr int KEEP = 0, SHIFT = 1, LOSSY = 2, IMPOSSIBLE = 3;

// --- tables, made by the compiler ------------------------------------------------------------------------------------

// 2|value| of a magnitude code: 0 1 2 3 4 6 8 12, as nibbles of one word.
constexpr int twice(unsigned magnitude) { return static_cast<int>(0xC8643210u >> (4 * magnitude) & 15); }

constexpr int distance(int a, int b) { return a < b ? b - a : a - b; }

// The magnitude code q that brings twice(q) * step nearest to `value`; a tie between neighbours goes to the even code.
constexpr unsigned nearest(int value, int step) {
  unsigned best = 0;
  for (unsigned q = 1; q < 8; ++q) {
    const int gain = distance(twice(best) * step, value) - distance(twice(q) * step, value);
    if (gain > 0 || (gain == 0 && q % 2 == 0)) best = q;
  }
  return best;
}

struct Map {  // byte i: the new magnitude code of code i (0-3 in low), or whatever else belongs to it
  uint32_t low, high;
};

// A lossy half under p = -9 - shift has a value of twice(code) half steps, and the byte's candidates are
// twice(q) * byte << shift (E4M3 bytes up to 15 are multiples of 2^-9). Past 24 all rounds to zero, so 12 + 6 + 3 + 1
// pairs of shift and byte are all there is to try; for each the compiler works out the nearest codes and their errors.

struct Tables {
  Map shifted[7];            // codes times 2^(i - 3)
  Map fitted[22], error[22];  // by first[shift] + byte - 1; errors squared, in half source steps
  int first[6];               // for shift 1..4; first[5] is the end
};

constexpr void put(Map& map, unsigned code, unsigned value) {
  (code < 4 ? map.low : map.high) |= value << (8 * (code % 4));
}

constexpr Tables make_tables() {
  Tables made{};
  for (int shift = -3; shift <= 3; ++shift)
    for (unsigned code = 0; code < 8; ++code) {
      const int moved = shift >= 0 ? twice(code) << shift : twice(code) >> -shift;
      for (unsigned q = 1; q < 8; ++q)
        if (twice(q) == moved) put(made.shifted[shift + 3], code, q);  // read only where the shift is exact
    }
  for (int shift = 1; shift <= 4; ++shift) {
    made.first[shift + 1] = made.first[shift] + (24 >> shift);
    for (int byte = 1; byte << shift <= 24; ++byte)
      for (unsigned code = 0; code < 8; ++code) {
        const int at = made.first[shift] + byte - 1, step = byte << shift;
        const unsigned q = nearest(twice(code), step);
        const int miss = distance(twice(code), twice(q) * step);
        put(made.fitted[at], code, q);
        put(made.error[at], code, static_cast<unsigned>(miss * miss));
      }
  }
  return made;
}

constexpr Tables HOST_TABLES = make_tables();
#ifdef __CUDACC__
__device__ const Tables DEVICE_TABLES = make_tables();
#endif

FP4_HD const Tables& tables() {
#ifdef __CUDA_ARCH__
  return DEVICE_TABLES;
#else
  return HOST_TABLES;
#endif
}

// --- the rules -------------------------------------------------------------------------------------------------------

// How often every nonzero magnitude of 16 codes halves and doubles exactly; 0, 0 where all are zero.
struct Limits {
  int halvings, doublings;
  bool live;
};

FP4_HD Limits limits_of(uint64_t half) {
  constexpr uint64_t ONES = 0x1111111111111111ull;
  const uint64_t b0 = half & ONES, b1 = half >> 1 & ONES, b2 = half >> 2 & ONES;
  Limits found;
  found.live = (b0 | b1 | b2) != 0;
  // halve: .5, 1.5 not at all; 1, 3 once; 2, 6 twice; 4 three times (to .5)
  const uint64_t never = ~b2 & b0, once = (~b2 & b1 & ~b0) | (b2 & ~b1 & b0), two = (b2 & b1 & b0) | (b2 & ~b1 & ~b0);
  found.halvings = never ? 0 : once ? 1 : two ? 2 : found.live ? 3 : 0;
  // double: 4, 6 not at all; 2, 3 once; 1, 1.5 twice; .5 three times
  found.doublings = (b2 & b1) ? 0 : b2 ? 1 : b1 ? 2 : found.live ? 3 : 0;
  return found;
}

struct Settled {
  int kind, exponent, shift;
};

// For a live half whose source scale is 2^p under the new global scale: what becomes of it.
FP4_HD Settled settle(int p, const Limits& found) {
  if (p > 8) return {p - 8 <= found.doublings ? SHIFT : IMPOSSIBLE, 8, p - 8};
  if (p >= -6) return {KEEP, p, 0};
  if (p + found.halvings >= -6) return {SHIFT, -6, p + 6};
  if (p >= -9) return {KEEP, p, 0};
  if (p + found.halvings >= -9) return {SHIFT, -9, p + 9};
  return {LOSSY, 0, 0};
}

FP4_HD unsigned pow2_byte(int p) { return p >= -6 ? static_cast<unsigned>(p + 7) << 3 : 1u << (p + 9); }

// Four magnitudes (nibbles of `select`, bit 3 clear) through a map: four bytes.
FP4_HD uint32_t look_up(const Map& map, uint32_t select) {
#ifdef __CUDA_ARCH__
  return __byte_perm(map.low, map.high, select);
#else
  uint32_t bytes = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t code = select >> (4 * i) & 7;
    bytes |= ((code < 4 ? map.low : map.high) >> (8 * (code % 4)) & 0xFF) << (8 * i);
  }
  return bytes;
#endif
}

// All 16 magnitudes through a map; signs kept.
FP4_HD uint64_t map_codes(uint64_t half, const Map& map) {
  uint64_t out = half & 0x8888888888888888ull;
  FP4_UNROLL
  for (int i = 0; i < 4; ++i) {
    uint32_t bytes = look_up(map, static_cast<uint32_t>(half >> (16 * i)) & 0x7777u);
    bytes |= bytes >> 4;
    out |= static_cast<uint64_t>((bytes & 0xFF) | (bytes >> 8 & 0xFF00)) << (16 * i);
  }
  return out;
}

FP4_HD uint32_t count_bits(uint64_t mask) {
#ifdef __CUDA_ARCH__
  return static_cast<uint32_t>(__popcll(static_cast<long long>(mask)));
#else
  return static_cast<uint32_t>(__builtin_popcountll(mask));
#endif
}

// Sum of products of four unsigned bytes.
FP4_HD uint32_t dot_unsigned(uint32_t a, uint32_t b, uint32_t sum) {
#ifdef __CUDA_ARCH__
  return __dp4a(a, b, sum);
#else
  for (int i = 0; i < 4; ++i) sum += (a >> (8 * i) & 0xFF) * (b >> (8 * i) & 0xFF);
  return sum;
#endif
}

struct Fit {
  uint32_t byte, error;
  int at;  // in the tables; -1: every code becomes zero
};

// Least squares for a lossy half, p < -9; the smallest byte wins a tie (repack_jit._fit).
FP4_HD Fit fit(uint64_t half, int p) {
  constexpr uint64_t ONES = 0x1111111111111111ull;
  const uint64_t b0 = half & ONES, b1 = half >> 1 & ONES, b2 = half >> 2 & ONES;
  const uint32_t low = count_bits(b0 & ~b1 & ~b2) << 8 | count_bits(b1 & ~b0 & ~b2) << 16 |
                       count_bits(b0 & b1 & ~b2) << 24;  // of a zero nothing is lost
  const uint32_t high = count_bits(b2 & ~b0 & ~b1) | count_bits(b2 & b0 & ~b1) << 8 | count_bits(b2 & b1 & ~b0) << 16 |
                        count_bits(b2 & b1 & b0) << 24;
  Fit best{DEAD_BYTE, dot_unsigned(low, 0x09040100u, dot_unsigned(high, 0x90402410u, 0)), -1};  // squares of twice()
  const int shift = -9 - p < 5 ? -9 - p : 5;
  if (shift == 5) return best;
  const int first = tables().first[shift], end = tables().first[shift + 1];
  for (int at = first; at < end; ++at) {
    const Map error = tables().error[at];
    const uint32_t sum = dot_unsigned(low, error.low, dot_unsigned(high, error.high, 0));
    if (sum < best.error) best = {static_cast<uint32_t>(at - first + 1), sum, at};
  }
  return best;
}

struct Tally {  // halves; those that are in none of these kept codes and value
  unsigned shifted = 0, lossy = 0, below = 0, impossible = 0;
};

// A half that loses bits: the scale byte with the least squared error, and the codes nearest under it.
FP4_HD unsigned settle_lossy(uint64_t& half, int p, Tally& tally) {
  const Fit best = fit(half, p);
  half = best.at < 0 ? half & 0x8888888888888888ull : map_codes(half, tables().fitted[best.at]);
  ++tally.lossy;
  tally.below += best.byte < 8;
  return best.byte;
}

// One half by the table of repack_jit.py; returns its scale byte and rewrites its codes.
FP4_HD unsigned settle_half(uint64_t& half, int p, bool dead_block, Tally& tally) {
  const Limits found = limits_of(half);
  if (!found.live) return p >= -6 && p <= 8 && !dead_block ? pow2_byte(p) : DEAD_BYTE;
  const Settled way = settle(p, found);
  if (way.kind == IMPOSSIBLE) {
    ++tally.impossible;
    return DEAD_BYTE;
  }
  if (way.kind == LOSSY) return settle_lossy(half, p, tally);
  const unsigned byte = pow2_byte(way.exponent);
  if (way.kind == SHIFT) {
    half = map_codes(half, tables().shifted[way.shift + 3]);
    ++tally.shifted;
  }
  tally.below += byte < 8;
  return byte;
}

#ifdef __CUDACC__
struct RepackArgs {
  const uint4* codes;
  const uint8_t* scales;
  uint4* out_codes;
  uint16_t* out_scales;
  unsigned long long* counts;
  size_t blocks;
  int m;
};

__device__ __forceinline__ uint64_t half_of(const uint4& codes, int half) {
  return half ? static_cast<uint64_t>(codes.w) << 32 | codes.z : static_cast<uint64_t>(codes.y) << 32 | codes.x;
}

// Into a shared counter, once per warp.
__device__ __forceinline__ void count_in(unsigned* total, unsigned mine) {
  const unsigned sum = __reduce_add_sync(0xFFFFFFFFu, mine);
  if (sum && threadIdx.x % 32 == 0) atomicAdd(total, sum);
}

// Step 1: every scale fits and no code is looked at (repack.window_scales).
__global__ void __launch_bounds__(256) window_kernel(const RepackArgs args) {
  const size_t stride = blockDim.x, first = blockIdx.x * stride * REPACK_UNROLL + threadIdx.x;
  uint4 codes[REPACK_UNROLL];
  int scale[REPACK_UNROLL];
FP4_UNROLL
  for (int i = 0; i < REPACK_UNROLL; ++i) {
    const size_t block = first + i * stride;
    if (block < args.blocks) codes[i] = __ldcs(args.codes + block), scale[i] = args.scales[block];
  }
FP4_UNROLL
  for (int i = 0; i < REPACK_UNROLL; ++i) {
    const size_t block = first + i * stride;
    if (block >= args.blocks) continue;
    const unsigned byte = static_cast<unsigned>(scale[i] - E8M0_BIAS - args.m + 7) << 3;
    __stcs(args.out_codes + block, codes[i]);
    args.out_scales[block] = static_cast<uint16_t>(byte | byte << 8);
  }
}

// Step 2: the table of repack_jit.py. A live block out of range costs some 500 instructions, and a warp pays for them if
// one of its lanes does: so such blocks are queued in shared memory and settled side by side, a half per thread, and the
// halves that need a fit (half of the cost) once more apart. Their owners then write all blocks alike, 16 bytes each.
__global__ void __launch_bounds__(256) halves_kernel(const RepackArgs args) {
  constexpr int MOST = 256 * REPACK_UNROLL;
  __shared__ uint4 queue[MOST];          // codes of the blocks out of range
  __shared__ int8_t exponent[MOST];      // their p, clamped: past 14 octaves under the range all is zero
  __shared__ uint16_t scale_out[MOST];
  __shared__ uint16_t lossy[2 * MOST];   // halves that need a fit
  __shared__ unsigned queued, fits, total[4];
  const size_t stride = blockDim.x, first = blockIdx.x * stride * REPACK_UNROLL + threadIdx.x;
  uint4 codes[REPACK_UNROLL];
  int scale[REPACK_UNROLL], place[REPACK_UNROLL];
FP4_UNROLL
  for (int i = 0; i < REPACK_UNROLL; ++i) {
    const size_t block = first + i * stride;
    codes[i] = make_uint4(0, 0, 0, 0), scale[i] = 0;
    if (block < args.blocks) codes[i] = __ldcs(args.codes + block), scale[i] = args.scales[block];
  }
  if (threadIdx.x == 0) queued = fits = 0;
  if (threadIdx.x < 4) total[threadIdx.x] = 0;
  __syncthreads();
FP4_UNROLL
  for (int i = 0; i < REPACK_UNROLL; ++i) {
    const size_t block = first + i * stride;
    const int p = scale[i] - E8M0_BIAS - args.m;
    const bool dead = ((codes[i].x | codes[i].y | codes[i].z | codes[i].w) & 0x77777777u) == 0;
    const bool inside = p >= -6 && p <= 8, waits = !inside && !dead;  // blocks past the end are dead
    const unsigned waiting = __ballot_sync(0xFFFFFFFFu, waits), lane = threadIdx.x % 32;
    unsigned base = 0;
    if (waiting && lane == 0) base = atomicAdd(&queued, static_cast<unsigned>(__popc(waiting)));
    base = __shfl_sync(0xFFFFFFFFu, base, 0);
    place[i] = waits ? static_cast<int>(base) + __popc(waiting & ((1u << lane) - 1)) : -1;
    if (waits) {
      queue[place[i]] = codes[i];
      exponent[place[i]] = static_cast<int8_t>(p < -24 ? -24 : p > 24 ? 24 : p);
    } else if (block < args.blocks) {
      const unsigned byte = dead ? DEAD_BYTE : pow2_byte(p);
      __stcs(args.out_codes + block, codes[i]);
      args.out_scales[block] = static_cast<uint16_t>(byte | byte << 8);
    }
  }
  __syncthreads();
  if (queued == 0) return;
  uint64_t* const halves = reinterpret_cast<uint64_t*>(queue);
  uint8_t* const bytes = reinterpret_cast<uint8_t*>(scale_out);
  Tally tally;
  for (unsigned at = threadIdx.x; at < 2 * queued; at += blockDim.x) {
    uint64_t half = halves[at];
    const int p = exponent[at / 2];
    const Limits found = limits_of(half);
    if (found.live && settle(p, found).kind == LOSSY) {
      lossy[atomicAdd(&fits, 1u)] = static_cast<uint16_t>(at);
    } else {
      bytes[at] = static_cast<uint8_t>(settle_half(half, p, false, tally));
      halves[at] = half;
    }
  }
  __syncthreads();
  for (unsigned at = threadIdx.x; at < fits; at += blockDim.x) {
    const unsigned which = lossy[at];
    bytes[which] = static_cast<uint8_t>(settle_lossy(halves[which], exponent[which / 2], tally));
  }
  count_in(total + 0, tally.shifted), count_in(total + 1, tally.lossy);
  count_in(total + 2, tally.below), count_in(total + 3, tally.impossible);
  __syncthreads();
FP4_UNROLL
  for (int i = 0; i < REPACK_UNROLL; ++i) {
    if (place[i] < 0) continue;
    const size_t block = first + i * stride;
    __stcs(args.out_codes + block, queue[place[i]]);
    args.out_scales[block] = scale_out[place[i]];
  }
  // One addition per CTA: one per warp to the same address would cost more than all the rest.
  if (threadIdx.x < 4 && total[threadIdx.x])
    atomicAdd(args.counts + threadIdx.x, static_cast<unsigned long long>(total[threadIdx.x]));
}

// Where a scale's 32 bins lie: turned by the scale, so that neighbours with like codes and unlike scales meet no bank twice.
__device__ __forceinline__ unsigned bin_of(unsigned scale, unsigned kind) { return scale * 32 + ((kind ^ scale) & 31); }

// Increments of one shared word by several lanes are one operation (ATOMS.POPC.INC): neighbours mostly share their bin.
__global__ void __launch_bounds__(256) census_kernel(const uint4* codes, const uint8_t* scales, size_t blocks,
                                                     unsigned long long* hist) {
  __shared__ unsigned bins[256 * 32];
  for (int i = threadIdx.x; i < 256 * 32; i += blockDim.x) bins[i] = 0;
  __syncthreads();
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t base = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; base < blocks; base += CENSUS_UNROLL * stride) {
    uint4 v[CENSUS_UNROLL];
    unsigned scale[CENSUS_UNROLL];
FP4_UNROLL
    for (int i = 0; i < CENSUS_UNROLL; ++i)
      if (base + i * stride < blocks) v[i] = codes[base + i * stride], scale[i] = scales[base + i * stride];
FP4_UNROLL
    for (int i = 0; i < CENSUS_UNROLL; ++i) {
      if (base + i * stride >= blocks) continue;
      for (int half = 0; half < 2; ++half) {
        const Limits found = limits_of(half_of(v[i], half));
        const unsigned kind = static_cast<unsigned>(found.halvings * 8 + found.doublings * 2 + found.live);
        atomicAdd(bins + bin_of(scale[i], kind), 1u);
      }
    }
  }
  __syncthreads();
  for (unsigned i = threadIdx.x; i < 256 * 32; i += blockDim.x) {
    const unsigned count = bins[bin_of(i / 32, i % 32)];
    if (count) atomicAdd(hist + i, static_cast<unsigned long long>(count));
  }
}

// A CTA's errors fit 32 bits: it takes LOSSY_PER_THREAD blocks a thread, and a half's error is at most 16 * 12 * 12.
__global__ void __launch_bounds__(256) lossy_error_kernel(const uint4* codes, const uint8_t* scales, size_t blocks, int m,
                                                          unsigned long long* err, unsigned long long* counts) {
  __shared__ unsigned errors[256], below, impossible;
  errors[threadIdx.x] = 0;
  if (threadIdx.x == 0) below = impossible = 0;
  __syncthreads();
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t block = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; block < blocks; block += stride) {
    const int p = scales[block] - E8M0_BIAS - m;
    if (p >= -9 && p <= 8) continue;
    const uint4 v = codes[block];
    for (int i = 0; i < 2; ++i) {
      const uint64_t half = half_of(v, i);
      const Limits found = limits_of(half);
      if (!found.live) continue;
      const int kind = settle(p, found).kind;
      if (kind == LOSSY) {
        const Fit best = fit(half, p);
        atomicAdd(errors + scales[block], best.error);
        if (best.byte < 8) atomicAdd(&below, 1u);
      } else if (kind == IMPOSSIBLE) {
        atomicAdd(&impossible, 1u);
      }
    }
  }
  __syncthreads();
  if (errors[threadIdx.x]) atomicAdd(err + threadIdx.x, static_cast<unsigned long long>(errors[threadIdx.x]));
  if (threadIdx.x == 0 && below) atomicAdd(counts, static_cast<unsigned long long>(below));
  if (threadIdx.x == 0 && impossible) atomicAdd(counts + 1, static_cast<unsigned long long>(impossible));
}

__global__ void __launch_bounds__(256) scale_range_kernel(const uint8_t* scales, size_t count, unsigned* range) {
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x, words = count / 16;
  unsigned low = 0xFFFFFFFFu, high = 0;  // four bytes side by side
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < words; i += stride) {
    const uint4 v = reinterpret_cast<const uint4*>(scales)[i];
    low = __vminu4(__vminu4(low, __vminu4(v.x, v.y)), __vminu4(v.z, v.w));
    high = __vmaxu4(__vmaxu4(high, __vmaxu4(v.x, v.y)), __vmaxu4(v.z, v.w));
  }
  unsigned least = 255, most = 0;
  for (int byte = 0; byte < 4; ++byte) {
    least = min(least, low >> (8 * byte) & 255);
    most = max(most, high >> (8 * byte) & 255);
  }
  if (blockIdx.x == 0 && threadIdx.x < count % 16) {
    const unsigned scale = scales[words * 16 + threadIdx.x];
    least = min(least, scale), most = max(most, scale);
  }
  least = __reduce_min_sync(0xFFFFFFFFu, least);
  most = __reduce_max_sync(0xFFFFFFFFu, most);
  if (threadIdx.x % 32 == 0) {
    atomicMin(range, least);
    atomicMax(range + 1, most);
  }
}

#endif

}  // namespace requant
