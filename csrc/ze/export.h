// What every library shares: functions under their plain C name, and functions for CPU and GPU alike.
#pragma once

#define ZE_EXPORT extern "C" __attribute__((visibility("default")))

#ifdef __CUDACC__
#define ZE_HD __host__ __device__ __forceinline__
#else
#define ZE_HD inline __attribute__((always_inline))
#endif
