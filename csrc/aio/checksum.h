// A 64-bit checksum of a block, at the speed of memory: four independent lanes, each word multiplied and rotated in, so
// that a changed, moved or missing word shows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ze::aio {

inline uint64_t mixed(uint64_t lane, uint64_t word) {
    constexpr uint64_t kOdd = 0xd6e8feb86659fd93ull;
    lane = (lane ^ word) * kOdd;
    return (lane << 29) | (lane >> 35);
}

inline uint64_t checksum(const void* data, size_t bytes) {
    const char* at = static_cast<const char*>(data);
    uint64_t lanes[4] = {0x243f6a8885a308d3ull, 0x13198a2e03707344ull, 0xa4093822299f31d0ull, 0x082efa98ec4e6c89ull};
    size_t left = bytes;
    for (; left >= 32; left -= 32, at += 32) {
        uint64_t words[4];
        std::memcpy(words, at, sizeof words);
        for (int i = 0; i < 4; ++i) lanes[i] = mixed(lanes[i], words[i]);
    }
    uint64_t total = bytes;
    for (uint64_t lane : lanes) total = mixed(total, lane);
    for (; left > 0; --left, ++at) total = mixed(total, static_cast<unsigned char>(*at));
    return total;
}

}  // namespace ze::aio
