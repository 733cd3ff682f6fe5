// The encoding rules of w4a4_encode.cuh as a library for test_w4a4_encode.py.
#include "w4a4_encode.cuh"

using namespace requant;

extern "C" void host_encode_nvfp4(int blocks, const uint32_t* pairs, float global_scale, uint32_t* codes,
                                  uint8_t* scales) {
  for (int i = 0; i < blocks; ++i) {
    uint32_t in[8], out[2];
    memcpy(in, pairs + 8 * i, sizeof in);
    scales[i] = static_cast<uint8_t>(encode_nvfp4(in, global_scale, out));
    memcpy(codes + 2 * i, out, sizeof out);
  }
}

extern "C" void host_encode_mxfp4(int blocks, const uint32_t* pairs, uint32_t* codes, uint8_t* scales) {
  for (int i = 0; i < blocks; ++i) {
    uint32_t in[16], out[4];
    memcpy(in, pairs + 16 * i, sizeof in);
    scales[i] = static_cast<uint8_t>(encode_mxfp4(in, out));
    memcpy(codes + 4 * i, out, sizeof out);
  }
}

extern "C" float host_global_scale(float amax) { return nvfp4_global_scale(amax); }
