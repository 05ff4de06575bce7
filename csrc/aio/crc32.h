// CRC-32 as in zip and Ethernet, by carry-less multiplication (V. Gopal et al., "Fast CRC Computation for Generic
// Polynomials Using PCLMULQDQ Instruction", Intel 2009): 64 bytes at a time are moved on over the next 64 without
// changing the remainder, and what is left at the end is summed byte by byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ze::aio {

// One step of division: the remainder of `r` times x. Bit 31 is the power 0.
constexpr uint32_t times_x(uint32_t r) { return (r >> 1) ^ ((r & 1u) != 0 ? 0xedb88320u : 0u); }

// The factor that moves 64 bits on by `bits`: the remainder of that power of x, in the place where the product of two
// reflected numbers wants it.
constexpr uint64_t moved(int bits) {
    uint32_t r = 0x80000000u;
    for (int i = 0; i < bits; ++i) r = times_x(r);
    return static_cast<uint64_t>(r) << 1;
}

struct CrcTable {
    uint32_t entries[256];
    constexpr CrcTable() : entries() {
        for (uint32_t i = 0; i < 256; ++i) {
            uint32_t r = i;
            for (int bit = 0; bit < 8; ++bit) r = times_x(r);
            entries[i] = r;
        }
    }
};
inline constexpr CrcTable kCrcTable;

inline uint32_t by_bytes(uint32_t state, const unsigned char* at, size_t bytes) {
    for (; bytes > 0; --bytes, ++at) state = kCrcTable.entries[(state ^ *at) & 0xffu] ^ (state >> 8);
    return state;
}

#if defined(__x86_64__)
inline bool crc32_is_fast() { return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse2"); }

#define ZE_CARRYLESS __attribute__((target("pclmul,sse2")))

ZE_CARRYLESS inline __m128i load_16(const unsigned char* at) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
}

// `lane` moved on by as many bits as `by` says for its halves, over `next`.
ZE_CARRYLESS inline __m128i folded(__m128i lane, __m128i by, __m128i next) {
    const __m128i low = _mm_clmulepi64_si128(lane, by, 0x00), high = _mm_clmulepi64_si128(lane, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// The state after whole pieces of 16 bytes, 64 at least; the rest is left to the caller.
ZE_CARRYLESS inline uint32_t by_folding(uint32_t state, const unsigned char*& at, size_t& bytes) {
    constexpr uint64_t far_low = moved(4 * 128 + 32), far_high = moved(4 * 128 - 32);
    constexpr uint64_t near_low = moved(128 + 32), near_high = moved(128 - 32);
    const __m128i by_64 = _mm_set_epi64x(static_cast<int64_t>(far_high), static_cast<int64_t>(far_low));
    const __m128i by_16 = _mm_set_epi64x(static_cast<int64_t>(near_high), static_cast<int64_t>(near_low));
    __m128i lanes[4];
    for (int i = 0; i < 4; ++i) lanes[i] = load_16(at + 16 * i);
    lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(static_cast<int>(state)));
    for (at += 64, bytes -= 64; bytes >= 64; at += 64, bytes -= 64)
        for (int i = 0; i < 4; ++i) lanes[i] = folded(lanes[i], by_64, load_16(at + 16 * i));
    __m128i left = lanes[0];
    for (int i = 1; i < 4; ++i) left = folded(left, by_16, lanes[i]);
    for (; bytes >= 16; at += 16, bytes -= 16) left = folded(left, by_16, load_16(at));
    unsigned char rest[16];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(rest), left);
    return by_bytes(0, rest, sizeof rest);
}
#undef ZE_CARRYLESS
#else
inline bool crc32_is_fast() { return false; }
inline uint32_t by_folding(uint32_t state, const unsigned char*&, size_t&) { return state; }
#endif

// The sum of what `sum` is of, and `bytes` more.
inline uint32_t crc32(uint32_t sum, const void* data, size_t bytes) {
    const unsigned char* at = static_cast<const unsigned char*>(data);
    uint32_t state = ~sum;
    if (bytes >= 64 && crc32_is_fast()) state = by_folding(state, at, bytes);
    return ~by_bytes(state, at, bytes);
}

}  // namespace ze::aio
