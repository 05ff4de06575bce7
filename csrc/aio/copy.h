// A copy past the caches, for memory that is not read again soon: an ordinary one first reads what it is going to
// overwrite, which is a third of the traffic, and pushes out what the computation needs next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace ze::aio {

inline void copy_past_caches(char* to, const char* from, size_t bytes) {
#if defined(__x86_64__)
    constexpr size_t kLine = 64;
    const size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
    if (bytes >= head + kLine) {
        std::memcpy(to, from, head);
        to += head, from += head, bytes -= head;
        for (; bytes >= kLine; to += kLine, from += kLine, bytes -= kLine) {
            __m128i line[4];
            std::memcpy(line, from, kLine);
            for (int i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, line[i]);
        }
        _mm_sfence();  // visible to whoever is told that the copy is done
    }
#endif
    std::memcpy(to, from, bytes);
}

}  // namespace ze::aio
