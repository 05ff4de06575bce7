// fp32 to and from bf16 and fp16 in memory, rounding to nearest, ties to even. Every way gives the same bits.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__F16C__) && defined(__AVX__)
#include <immintrin.h>
#define ZE_F16C 1
#endif

#include "ze/segments.h"

namespace ze {

inline uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

inline float float_of(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

inline float from_bfloat16(uint16_t x) { return float_of(uint32_t(x) << 16); }

inline uint16_t to_bfloat16(float x) {
    const uint32_t u = bits_of(x);
    const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return uint16_t((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

inline float from_half(uint16_t x) {
    const uint32_t sign = uint32_t(x & 0x8000u) << 16, rest = x & 0x7fffu;
    if (rest >= 0x7c00u) return float_of(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
    if (rest < 0x400u) return float_of(sign | bits_of(float(rest) * 0x1p-24f));
    return float_of(sign | ((rest << 13) + (112u << 23)));
}

inline uint16_t to_half(float x) {
    const uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000u, rest = u & 0x7fffffffu;
    if (rest > 0x7f800000u) return uint16_t(sign | 0x7e00u);
    if (rest >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // 65520 and more round to infinity
    if (rest < 0x38800000u) {                                  // below 2^-14: an addition rounds to multiples of 2^-24
        return uint16_t(sign | (bits_of(float_of(rest) + 0.5f) - bits_of(0.5f)));
    }
    return uint16_t(sign | ((rest + 0xfffu + ((rest >> 13) & 1u) - (112u << 23)) >> 13));
}

// Reads elements [begin, begin + n) as fp32 into `buffer`, or returns where they lie if they are fp32.
inline const float* load(const void* source, int kind, int64_t begin, int64_t n, float* __restrict buffer) {
    if (kind == kFloat) return static_cast<const float*>(source) + begin;
    const uint16_t* __restrict from = static_cast<const uint16_t*>(source) + begin;
    if (kind == kBfloat16) {
        for (int64_t i = 0; i < n; ++i) buffer[i] = from_bfloat16(from[i]);
        return buffer;
    }
    int64_t i = 0;
#ifdef ZE_F16C
    for (; i + 8 <= n; i += 8) {
        _mm256_storeu_ps(buffer + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
    }
#endif
    for (int64_t left = n - i; left > 0; --left, ++i) buffer[i] = from_half(from[i]);
    return buffer;
}

// Writes `n` fp32 values to elements [begin, begin + n) of `target`.
inline void store(void* target, int kind, int64_t begin, int64_t n, const float* __restrict values) {
    if (kind == kFloat) {
        memcpy(static_cast<float*>(target) + begin, values, size_t(n) * 4);
        return;
    }
    uint16_t* __restrict to = static_cast<uint16_t*>(target) + begin;
    if (kind == kBfloat16) {
        for (int64_t i = 0; i < n; ++i) to[i] = to_bfloat16(values[i]);
        return;
    }
    int64_t i = 0;
#ifdef ZE_F16C
    for (; i + 8 <= n; i += 8) {
        const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(values + i), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), half);
    }
#endif
    for (int64_t left = n - i; left > 0; --left, ++i) to[i] = to_half(values[i]);
}

}  // namespace ze
