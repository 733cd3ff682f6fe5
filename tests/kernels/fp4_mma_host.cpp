// The host side of fp4_mma.cuh as a library for test_fp4_mma_host.py: single outputs, and a whole warp of 32 lanes.
#include "fp4_mma.cuh"

using namespace requant;
using namespace requant::emulation;

template <Format FORMAT>
static void outputs(int count, const uint32_t* a, const uint32_t* b, const uint32_t* scale_a, const uint32_t* scale_b,
                    const float* c, float* d) {
  for (int i = 0; i < count; ++i) {
    int dots[4] = {};
    for (int word = 0; word < 8; ++word) dots[word / 2] += dot_codes(a[8 * i + word], b[8 * i + word]);
    d[i] = accumulate<FORMAT>(c[i], dots, scale_a[i], scale_b[i]);
  }
}

struct HostWarp {
  const uint32_t *a_, *b_, *sfa_, *sfb_;  // [32][4], [32][2], [32], [32]
  uint32_t a(int i, int lane) const { return a_[4 * lane + i]; }
  uint32_t b(int i, int lane) const { return b_[2 * lane + i]; }
  uint32_t sfa(int lane) const { return sfa_[lane]; }
  uint32_t sfb(int lane) const { return sfb_[lane]; }
};

template <Format FORMAT>
static void warp(const HostWarp& lanes, float* d, int byte, int ta, int tb) {
  for (int lane = 0; lane < 32; ++lane) {
    float fragment[4];
    memcpy(fragment, d + 4 * lane, sizeof fragment);
    mma_lane<FORMAT>(lanes, lane, fragment, byte, ta, tb);
    memcpy(d + 4 * lane, fragment, sizeof fragment);
  }
}

extern "C" void host_outputs(int mxfp4, int count, const uint32_t* a, const uint32_t* b, const uint32_t* scale_a,
                             const uint32_t* scale_b, const float* c, float* d) {
  (mxfp4 ? outputs<Format::MXFP4> : outputs<Format::NVFP4>)(count, a, b, scale_a, scale_b, c, d);
}

extern "C" void host_warp(int mxfp4, const uint32_t* a, const uint32_t* b, const uint32_t* sfa, const uint32_t* sfb,
                          float* d, int byte, int ta, int tb) {
  (mxfp4 ? warp<Format::MXFP4> : warp<Format::NVFP4>)(HostWarp{a, b, sfa, sfb}, d, byte, ta, tb);
}
