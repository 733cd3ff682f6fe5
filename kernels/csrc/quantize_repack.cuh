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

// A lossy half under p = -9 - shift holds values of twice(code) half steps of its source; the scale byte b (a multiple of
// 2^-9, up to 15) offers twice(q) * (b << shift). Past 24 all rounds to zero, so shifts of 1 to 4 are all there are, and
// among the bytes the least squares always end at b = 1: its error is the least code by code (proven below).
constexpr int FITS = 4;

constexpr int miss_of(unsigned code, int step) {
  const int miss = distance(twice(code), twice(nearest(twice(code), step)) * step);
  return miss * miss;
}

struct Tables {
  Map shifted[7];               // codes times 2^(i - 3)
  Map fitted[FITS], error[FITS];  // under b = 1, by shift - 1; errors squared, in half source steps
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
  for (int shift = 1; shift <= FITS; ++shift)
    for (unsigned code = 0; code < 8; ++code) {
      put(made.fitted[shift - 1], code, nearest(twice(code), 1 << shift));
      put(made.error[shift - 1], code, static_cast<unsigned>(miss_of(code, 1 << shift)));
    }
  return made;
}

// Of codes given as bit planes, those whose error under b = 1 is less than that of a zero in their place.
FP4_HD constexpr uint32_t gaining(int shift, uint32_t b0, uint32_t b1, uint32_t b2) {
  const uint32_t few = shift == 3 ? b2 & (b0 | b1) : shift == 4 ? b2 & b1 & b0 : 0;
  return shift == 1 ? b1 | b2 : shift == 2 ? b2 | (b1 & b0) : few;
}

constexpr bool byte_one_is_best() {
  for (int shift = 1; shift < 8; ++shift)
    for (unsigned code = 0; code < 8; ++code) {
      const int error = miss_of(code, 1 << shift);
      for (int byte = 1; byte << shift <= 48; ++byte)
        if (miss_of(code, byte << shift) < error) return false;
      if ((error < twice(code) * twice(code)) != (gaining(shift, code & 1, code >> 1 & 1, code >> 2) != 0)) return false;
    }
  return true;
}
static_assert(byte_one_is_best(), "a search over scale bytes would be needed");

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

// The bits of 16 magnitudes, plane by plane: bit 4i of a plane for code i of the first word, bit 4i + 1 for the second.
struct Planes {
  uint32_t b0, b1, b2;
};

FP4_HD Planes planes_of(uint64_t half) {
  constexpr uint32_t FIRST = 0x11111111u, SECOND = 0x22222222u;
  const uint32_t a = static_cast<uint32_t>(half), b = static_cast<uint32_t>(half >> 32);
  return {(a & FIRST) | (b << 1 & SECOND), (a >> 1 & FIRST) | (b & SECOND), (a >> 2 & FIRST) | (b >> 1 & SECOND)};
}

// How often every nonzero magnitude of 16 codes halves and doubles exactly; 0, 0 where all are zero.
struct Limits {
  int halvings, doublings;
  bool live;
};

FP4_HD Limits limits_of(const Planes& of) {
  const uint32_t b0 = of.b0, b1 = of.b1, b2 = of.b2;
  Limits found;
  found.live = (b0 | b1 | b2) != 0;
  // halve: .5, 1.5 not at all; 1, 3 once; 2, 6 twice; 4 three times (to .5)
  const uint32_t never = ~b2 & b0, once = (~b2 & b1 & ~b0) | (b2 & ~b1 & b0), two = (b2 & b1 & b0) | (b2 & ~b1 & ~b0);
  found.halvings = never ? 0 : once ? 1 : two ? 2 : found.live ? 3 : 0;
  // double: 4, 6 not at all; 2, 3 once; 1, 1.5 twice; .5 three times
  found.doublings = (b2 & b1) ? 0 : b2 ? 1 : b1 ? 2 : found.live ? 3 : 0;
  return found;
}

FP4_HD Limits limits_of(uint64_t half) { return limits_of(planes_of(half)); }

// Some code of the 8 in a word is .5 or 1.5: a half with such a word does not halve.
FP4_HD uint32_t not_halved(uint32_t codes) { return codes & ~(codes >> 2) & 0x11111111u; }

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

// Bytes of nibbles (0 to 7) of two words, packed: a's to the low half.
FP4_HD uint32_t pack_nibbles(uint32_t a, uint32_t b) {
  a |= a >> 4, b |= b >> 4;
#ifdef __CUDA_ARCH__
  return __byte_perm(a, b, 0x6420);
#else
  return (a & 0xFF) | (a >> 8 & 0xFF00) | (b & 0xFF) << 16 | (b >> 16 & 0xFF) << 24;
#endif
}

// 8 magnitudes through a map; signs kept.
FP4_HD uint32_t map_word(uint32_t codes, const Map& map) {
  const uint32_t select = codes & 0x77777777u;
  return (codes & 0x88888888u) | pack_nibbles(look_up(map, select & 0xFFFF), look_up(map, select >> 16));
}

FP4_HD uint64_t map_codes(uint64_t half, const Map& map) {
  return static_cast<uint64_t>(map_word(static_cast<uint32_t>(half >> 32), map)) << 32 |
         map_word(static_cast<uint32_t>(half), map);
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

// Least squares for a lossy half, p < -9 (repack_jit._fit): the index of its maps (its byte is 1), or -1: all zero, 0x08.
FP4_HD int fit(const Planes& half, int p) {
  return gaining(-9 - p, half.b0, half.b1, half.b2) ? -10 - p : -1;
}

FP4_HD unsigned fitted_byte(int at) { return at < 0 ? DEAD_BYTE : 1u; }

// Its squared error, in half steps of the source.
FP4_HD uint32_t fit_error(uint64_t half, int at) {
  const Map squares{0x09040100u, 0x90402410u};  // of twice(), where every code becomes zero
  const Map error = at < 0 ? squares : tables().error[at];
  uint32_t sum = 0;
  FP4_UNROLL
  for (int i = 0; i < 4; ++i)
    sum = dot_unsigned(look_up(error, static_cast<uint32_t>(half >> (16 * i)) & 0x7777u), 0x01010101u, sum);
  return sum;
}

struct Tally {  // halves; those that are in none of these kept codes and value
  unsigned shifted = 0, lossy = 0, below = 0, impossible = 0;
};

// A half that loses bits: the scale byte with the least squared error, and the codes nearest under it.
FP4_HD unsigned settle_lossy(uint64_t& half, const Planes& planes, int p, Tally& tally) {
  const int at = fit(planes, p);
  half = at < 0 ? half & 0x8888888888888888ull : map_codes(half, tables().fitted[at]);
  ++tally.lossy;
  tally.below += at >= 0;
  return fitted_byte(at);
}

// A live half that keeps its values, or cannot be (counted; m is too small).
FP4_HD unsigned settle_exact(uint64_t& half, const Settled& way, Tally& tally) {
  if (way.kind == IMPOSSIBLE) {
    ++tally.impossible;
    return DEAD_BYTE;
  }
  const unsigned byte = pow2_byte(way.exponent);
  if (way.kind == SHIFT) {
    half = map_codes(half, tables().shifted[way.shift + 3]);
    ++tally.shifted;
  }
  tally.below += byte < 8;
  return byte;
}

// One half by the table of repack_jit.py; returns its scale byte and rewrites its codes.
FP4_HD unsigned settle_half(uint64_t& half, int p, bool dead_block, Tally& tally) {
  const Planes planes = planes_of(half);
  const Limits found = limits_of(planes);
  if (!found.live) return p >= -6 && p <= 8 && !dead_block ? pow2_byte(p) : DEAD_BYTE;
  const Settled way = settle(p, found);
  return way.kind == LOSSY ? settle_lossy(half, planes, p, tally) : settle_exact(half, way, tally);
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

constexpr int REPACK_THREADS = 256, REPACK_BLOCKS = REPACK_THREADS * REPACK_UNROLL;  // of a CTA

// A CTA's blocks, those of a thread REPACK_THREADS apart; `left` of them from the thread's first on.
struct RepackTile {
  const uint4* codes;
  const uint8_t* scales;
  uint4* out_codes;
  uint16_t* out_scales;
  int left;
};

__device__ __forceinline__ RepackTile tile_of(const RepackArgs& args) {
  const size_t first = static_cast<size_t>(blockIdx.x) * REPACK_BLOCKS + threadIdx.x;
  const size_t left = first < args.blocks ? args.blocks - first : 0;
  return {args.codes + first, args.scales + first, args.out_codes + first, args.out_scales + first,
          static_cast<int>(left < REPACK_BLOCKS ? left : REPACK_BLOCKS)};
}

// Step 1: every scale fits and no code is looked at (repack.window_scales).
__global__ void __launch_bounds__(REPACK_THREADS) window_kernel(const RepackArgs args) {
  const RepackTile tile = tile_of(args);
  uint4 codes[REPACK_UNROLL];
  int scale[REPACK_UNROLL];
FP4_UNROLL
  for (int i = 0; i < REPACK_UNROLL; ++i)
    if (i * REPACK_THREADS < tile.left)
      codes[i] = __ldcs(tile.codes + i * REPACK_THREADS), scale[i] = tile.scales[i * REPACK_THREADS];
FP4_UNROLL
  for (int i = 0; i < REPACK_UNROLL; ++i) {
    if (i * REPACK_THREADS >= tile.left) continue;
    __stcs(tile.out_codes + i * REPACK_THREADS, codes[i]);
    tile.out_scales[i * REPACK_THREADS] = static_cast<uint16_t>((scale[i] - E8M0_BIAS - args.m + 7) * 0x808);
  }
}

// Step 2: the table of repack_jit.py. A live block out of range costs two or three hundred instructions, and a warp pays
// for them if one of its lanes does: so each warp queues such blocks in shared memory and settles them side by side, a
// half per lane; their owners then write them as all others, 16 bytes each. Blocks a little under the range of which
// neither half halves keep their codes and are not queued.
__global__ void __launch_bounds__(REPACK_THREADS) halves_kernel(const RepackArgs args) {
  constexpr int WARPS = REPACK_THREADS / 32, ROOM = 32 * REPACK_UNROLL;
  __shared__ uint4 all_queues[WARPS][ROOM];         // codes of the blocks out of range
  __shared__ int8_t all_exponents[WARPS][ROOM];     // their p, clamped: past 14 octaves under the range all is zero
  __shared__ uint16_t all_scales[WARPS][ROOM];
  __shared__ unsigned total[3];
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, before = (1u << lane) - 1;
  uint4* const queue = all_queues[warp];
  int8_t* const exponents = all_exponents[warp];
  uint16_t* const scales = all_scales[warp];
  const RepackTile tile = tile_of(args);
  uint4 codes[REPACK_UNROLL];
  int scale[REPACK_UNROLL];
FP4_UNROLL
  for (int i = 0; i < REPACK_UNROLL; ++i) {
    codes[i] = make_uint4(0, 0, 0, 0), scale[i] = 0;  // blocks past the end are dead
    if (i * REPACK_THREADS < tile.left)
      codes[i] = __ldcs(tile.codes + i * REPACK_THREADS), scale[i] = tile.scales[i * REPACK_THREADS];
  }
  if (threadIdx.x < 3) total[threadIdx.x] = 0;
  __syncthreads();
  Tally tally;
  unsigned queued = 0;
  int out[REPACK_UNROLL];  // the two scale bytes, or -1 - its place in the queue
FP4_UNROLL
  for (int i = 0; i < REPACK_UNROLL; ++i) {
    const uint4& c = codes[i];
    const int p = scale[i] - E8M0_BIAS - args.m;
    const bool dead = ((c.x | c.y | c.z | c.w) & 0x77777777u) == 0;
    bool stays = dead || (p >= -6 && p <= 8);
    out[i] = dead ? DEAD_BYTE * 0x101 : (p + 7) * 0x808;
    if (!stays && p >= -9 && p < -6) {
      stays = (not_halved(c.x) | not_halved(c.y)) != 0 && (not_halved(c.z) | not_halved(c.w)) != 0;
      out[i] = 0x101 << (p + 9);
      tally.below += stays ? 2 : 0;
    }
    const unsigned waiting = __ballot_sync(0xFFFFFFFFu, !stays);
    if (!stays) {
      const int place = static_cast<int>(queued) + __popc(waiting & before);
      queue[place] = c;
      exponents[place] = static_cast<int8_t>(p < -24 ? -24 : p > 24 ? 24 : p);
      out[i] = -1 - place;
    }
    queued += static_cast<unsigned>(__popc(waiting));
  }
  __syncwarp();
  uint64_t* const halves = reinterpret_cast<uint64_t*>(queue);
  uint8_t* const bytes = reinterpret_cast<uint8_t*>(scales);
  for (unsigned at = lane; at < 2 * queued; at += 32) {
    uint64_t half = halves[at];
    bytes[at] = static_cast<uint8_t>(settle_half(half, exponents[at / 2], false, tally));
    halves[at] = half;
  }
  __syncwarp();
FP4_UNROLL
  for (int i = 0; i < REPACK_UNROLL; ++i) {
    if (out[i] < 0) codes[i] = queue[-1 - out[i]], out[i] = scales[-1 - out[i]];
    if (i * REPACK_THREADS < tile.left) {
      __stcs(tile.out_codes + i * REPACK_THREADS, codes[i]);
      tile.out_scales[i * REPACK_THREADS] = static_cast<uint16_t>(out[i]);
    }
  }
  // One addition per CTA: one per warp to the same address would cost more than all the rest. A warp's counts are at most
  // 2 * ROOM, so three fit a word.
  static_assert(2 * ROOM < 1024, "ten bits a count");
  const unsigned counts = __reduce_add_sync(0xFFFFFFFFu, tally.shifted | tally.lossy << 10 | tally.below << 20);
  if (lane < 3 && (counts >> (10 * lane) & 1023)) atomicAdd(total + lane, counts >> (10 * lane) & 1023);
  if (tally.impossible) atomicAdd(args.counts + 3, static_cast<unsigned long long>(tally.impossible));
  __syncthreads();
  if (threadIdx.x < 3 && total[threadIdx.x])
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
        const int at = fit(planes_of(half), p);
        atomicAdd(errors + scales[block], fit_error(half, at));
        if (at >= 0) atomicAdd(&below, 1u);
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
