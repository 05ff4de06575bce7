#include "kernels.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "ze/convert.h"

namespace ze::shm {
namespace {

struct BFloat16 {
    uint16_t bits;
};
struct Half {
    uint16_t bits;
};

// The type in which elements of a type are added; every result is rounded back.
template <class T>
struct Arithmetic {
    using type = T;
};
template <>
struct Arithmetic<BFloat16> {
    using type = float;
};
template <>
struct Arithmetic<Half> {
    using type = float;
};
template <class T>
using arithmetic_t = typename Arithmetic<T>::type;

constexpr int kBlock = 512;  // elements of a block: the partial sums of all levels stay in the first-level cache
constexpr int kLevels = 33;
constexpr int kDirectRows = 4;  // rows of fp32 that are added in registers
constexpr size_t kAlign = 64;

// -- blocks: values of type T to and from its arithmetic type --------------------------------------------------------

template <class T>
inline void load(const T* source, arithmetic_t<T>* target, int n) {
    std::memcpy(target, source, static_cast<size_t>(n) * sizeof(T));
}

template <>
inline void load(const BFloat16* source, float* target, int n) {
    ze::load(source, ze::Kind::kBfloat16, 0, n, target);
}

template <>
inline void load(const Half* source, float* target, int n) {
    ze::load(source, ze::Kind::kHalf, 0, n, target);
}

template <class T>
inline void store(const arithmetic_t<T>* source, T* target, int n) {
    std::memcpy(target, source, static_cast<size_t>(n) * sizeof(T));
}

template <>
inline void store(const float* source, BFloat16* target, int n) {
    ze::store(target, ze::Kind::kBfloat16, 0, n, source);
}

template <>
inline void store(const float* source, Half* target, int n) {
    ze::store(target, ze::Kind::kHalf, 0, n, source);
}

template <class T>
inline void round_block(arithmetic_t<T>* values, int n) {
    if constexpr (!std::is_same_v<T, arithmetic_t<T>>) {
        T rounded[kBlock];
        store(values, rounded, n);
        load(rounded, values, n);
    }
}

// Elements of type W in T's arithmetic type, for a T that holds all values of W.
template <class W, class T>
inline void load_as(const W* source, arithmetic_t<T>* target, int n) {
    if constexpr (std::is_same_v<W, T>) {
        load(source, target, n);
    } else {
        arithmetic_t<W> wide[kBlock];
        load(source, wide, n);
        for (int i = 0; i < n; ++i) target[i] = static_cast<arithmetic_t<T>>(wide[i]);
    }
}

template <class A>
inline A plus(A a, A b) {
    if constexpr (std::is_integral_v<A>) {  // wraps around, as torch's sums do
        using U = std::make_unsigned_t<A>;
        return static_cast<A>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
    } else {
        return a + b;
    }
}

template <class T>
inline void add(arithmetic_t<T>* __restrict__ to, const arithmetic_t<T>* __restrict__ from, int n) {
    for (int i = 0; i < n; ++i) to[i] = plus(to[i], from[i]);
    round_block<T>(to, n);
}

// -- copies
// ----------------------------------------------------------------------------------------------------------------

constexpr size_t kStream = size_t{4} << 20;  // from here on stores go past the caches

#if defined(__AVX__)
void stream(char* target, const char* source, size_t bytes) {
    const size_t head = std::min(bytes, (32 - reinterpret_cast<uintptr_t>(target) % 32) % 32);
    std::memcpy(target, source, head);
    target += head, source += head, bytes -= head;
    for (; bytes >= 128; target += 128, source += 128, bytes -= 128) {
        _mm_prefetch(source + 1024, _MM_HINT_NTA);
        _mm_prefetch(source + 1088, _MM_HINT_NTA);
        const __m256i* from = reinterpret_cast<const __m256i*>(source);
        __m256i* to = reinterpret_cast<__m256i*>(target);
        const __m256i a = _mm256_loadu_si256(from), b = _mm256_loadu_si256(from + 1);
        const __m256i c = _mm256_loadu_si256(from + 2), d = _mm256_loadu_si256(from + 3);
        _mm256_stream_si256(to, a);
        _mm256_stream_si256(to + 1, b);
        _mm256_stream_si256(to + 2, c);
        _mm256_stream_si256(to + 3, d);
    }
    _mm_sfence();
    std::memcpy(target, source, bytes);
}

inline void fence() { _mm_sfence(); }

// A whole block to an aligned target.
template <class T>
inline void store_past_caches(const arithmetic_t<T>* source, T* target) {
    alignas(kAlign) T block[kBlock];
    store(source, block, kBlock);
    const __m256i* from = reinterpret_cast<const __m256i*>(block);
    __m256i* to = reinterpret_cast<__m256i*>(target);
    constexpr size_t vectors = kBlock * sizeof(T) / 32;
    for (size_t i = 0; i < vectors; ++i) _mm256_stream_si256(to + i, _mm256_load_si256(from + i));
}
#else
inline void fence() {}

template <class T>
inline void store_past_caches(const arithmetic_t<T>* source, T* target) {
    store(source, target, kBlock);
}
#endif

// -- the sum
// -------------------------------------------------------------------------------------------------------------

// Sums of two and four rows whose type needs no rounding, in one pass.
template <class T>
inline void sum_rows(const T* const* rows, int n, size_t at, T* __restrict__ total, int count) {
    const T *a = rows[0] + at, *b = rows[1] + at;
    if (n == 2) {
        for (int i = 0; i < count; ++i) total[i] = plus(a[i], b[i]);
        return;
    }
    const T *c = rows[2] + at, *d = rows[3] + at;
    for (int i = 0; i < count; ++i) total[i] = plus(plus(a[i], b[i]), plus(c[i], d[i]));
}

template <class W, class T>
inline void sum_levels(const W* const* rows, int n, size_t at, arithmetic_t<T> (*partial)[kBlock], int count) {
    alignas(kAlign) arithmetic_t<T> other[kBlock];
    int top = 0;
    for (int r = 0; r < n; r += 2) {
        load_as<W, T>(rows[r] + at, partial[top], count);
        if (r + 1 < n) {
            load_as<W, T>(rows[r + 1] + at, other, count);
            add<T>(partial[top], other, count);
        }
        ++top;
        // as many neighbouring sums are complete as the number of pairs has trailing ones
        for (int pairs = r / 2; pairs & 1; pairs >>= 1) {
            --top;
            add<T>(partial[top - 1], partial[top], count);
        }
    }
    for (; top > 1; --top) add<T>(partial[top - 2], partial[top - 1], count);
}

// Rows come from memory one block after another: asking for what is two blocks ahead covers the wait, also across
// pages, where the hardware stops.
template <class W>
inline void prefetch(const W* row, size_t at, size_t count) {
    const size_t ahead = at + 2 * kBlock;
    if (ahead + kBlock > count) return;
    const char* from = reinterpret_cast<const char*>(row + ahead);
    for (size_t i = 0; i < kBlock * sizeof(W); i += 64) __builtin_prefetch(from + i);
}

#if defined(__AVX__)
// Elements [at, at + 8) of rows [first, first + n) added up: neighbours first, an odd one carried up.
template <int first, int n>
inline __m256 tree(const float* const* rows, size_t at) {
    if constexpr (n == 1) {
        return _mm256_loadu_ps(rows[first] + at);
    } else {
        constexpr int left = n <= 2 ? 1 : n <= 4 ? 2 : 4;  // the largest power of two below n
        const __m256 a = tree<first, left>(rows, at), b = tree<first + left, n - left>(rows, at);
        return _mm256_add_ps(a, b);
    }
}

// Whole groups of elements from the rows to the target in one pass without a block in between. Hardware finds that many
// sequences by itself. `target` is aligned to a line with `past_caches`. The number of elements done.
template <int n, bool scaled, bool accumulate, bool past_caches>
size_t sum_floats(float* target, const float* const* sources, size_t count, float scale) {
    constexpr size_t group = 16;  // a line
    const float* rows[n];
    for (int r = 0; r < n; ++r) rows[r] = sources[r];
    const __m256 factor = _mm256_set1_ps(scale);
    auto one = [&](size_t at) {
        __m256 total = tree<0, n>(rows, at);
        if constexpr (scaled) total = _mm256_mul_ps(total, factor);
        if constexpr (accumulate) total = _mm256_add_ps(total, _mm256_loadu_ps(target + at));
        return total;
    };
    size_t at = 0;
    for (; at + group <= count; at += group) {
        const __m256 a = one(at), b = one(at + 8);
        if constexpr (past_caches) {
            _mm256_stream_ps(target + at, a);
            _mm256_stream_ps(target + at + 8, b);
        } else {
            _mm256_storeu_ps(target + at, a);
            _mm256_storeu_ps(target + at + 8, b);
        }
    }
    return at;
}

template <int n>
size_t sum_floats(float* target, const float* const* rows, size_t count, double scale, bool accumulate,
                  bool past_caches) {
    const auto factor = static_cast<float>(scale);
    if (accumulate) {
        return scale != 1.0 ? sum_floats<n, true, true, false>(target, rows, count, factor)
                            : sum_floats<n, false, true, false>(target, rows, count, factor);
    }
    if (past_caches) {
        return scale != 1.0 ? sum_floats<n, true, false, true>(target, rows, count, factor)
                            : sum_floats<n, false, false, true>(target, rows, count, factor);
    }
    return scale != 1.0 ? sum_floats<n, true, false, false>(target, rows, count, factor)
                        : sum_floats<n, false, false, false>(target, rows, count, factor);
}
#endif

template <class W, class T>
void sum_of(void* out, const void* const* sources, int n, size_t count, double scale, bool accumulate, Store how) {
    using A = arithmetic_t<T>;
    alignas(kAlign) A partial[kLevels][kBlock];
    alignas(kAlign) A before[kBlock];
    A* total = partial[0];
    T* target = static_cast<T*>(out);
    const W* const* rows = reinterpret_cast<const W* const*>(sources);
    const bool past_caches =
        !accumulate && how == Store::kPastCaches && reinterpret_cast<uintptr_t>(out) % sizeof(T) == 0;
    // the first block ends where the target is aligned
    size_t here = past_caches ? (kAlign - reinterpret_cast<uintptr_t>(out) % kAlign) % kAlign / sizeof(T) : 0;
    if (here == 0) here = kBlock;
    for (size_t at = 0; at < count; at += here, here = kBlock) {
        const int size = static_cast<int>(count - at < here ? count - at : here);
        for (int r = 0; r < n; ++r) prefetch(rows[r], at, count);
        if constexpr (std::is_same_v<W, T> && std::is_same_v<T, A>) {
            if (n == 2 || n == 4) {
                sum_rows(rows, n, at, total, size);
            } else {
                sum_levels<W, T>(rows, n, at, partial, size);
            }
        } else {
            sum_levels<W, T>(rows, n, at, partial, size);
        }
        if constexpr (!std::is_integral_v<A>) {
            if (scale != 1.0) {
                const A factor = static_cast<A>(scale);
                for (int i = 0; i < size; ++i) total[i] *= factor;
                round_block<T>(total, size);
            }
        }
        if (accumulate) {
            load(target + at, before, size);
            add<T>(total, before, size);
        }
        if (past_caches && size == kBlock) {
            store_past_caches<T>(total, target + at);
        } else {
            store(total, target + at, size);
        }
    }
    fence();
}

// Two, three or four rows of fp32, which need no rounding between the levels, have a loop of their own.
void sum_of_floats(void* out, const void* const* sources, int n, size_t count, double scale, bool accumulate,
                   Store how) {
#if defined(__AVX__)
    if (n >= 2 && n <= kDirectRows) {
        const auto address = reinterpret_cast<uintptr_t>(out);
        const bool past_caches = !accumulate && how == Store::kPastCaches && address % sizeof(float) == 0;
        const size_t to_line = (kAlign - address % kAlign) % kAlign / sizeof(float);
        const size_t head = past_caches ? std::min(count, to_line) : 0;
        auto from = [&](size_t at, auto&& call) {
            const float* rows[kDirectRows];
            for (int r = 0; r < n; ++r) rows[r] = static_cast<const float*>(sources[r]) + at;
            return call(static_cast<float*>(out) + at, rows);
        };
        auto generic = [&](size_t at, size_t elements) {
            if (elements == 0) return;
            from(at, [&](float* target, const float* const* rows) {
                const void* const* any = reinterpret_cast<const void* const*>(rows);
                sum_of<float, float>(target, any, n, elements, scale, accumulate, Store::kCached);
            });
        };
        generic(0, head);
        const size_t whole = from(head, [&](float* target, const float* const* rows) {
            const auto direct = n == 2 ? &sum_floats<2> : n == 3 ? &sum_floats<3> : &sum_floats<4>;
            return direct(target, rows, count - head, scale, accumulate, past_caches);
        });
        fence();
        generic(head + whole, count - head - whole);
        return;
    }
#endif
    sum_of<float, float>(out, sources, n, count, scale, accumulate, how);
}

using Sum = void (*)(void*, const void* const*, int, size_t, double, bool, Store);

template <class W, class T>
constexpr Sum floats() {
    return &sum_of<W, T>;
}

Sum find_sum(int wire, int type) {
    // [wire][type]: the type holds all values of the wire
    static constexpr Sum mixed[4][4] = {
        {&sum_of_floats, floats<float, double>(), nullptr, nullptr},
        {nullptr, floats<double, double>(), nullptr, nullptr},
        {floats<BFloat16, float>(), floats<BFloat16, double>(), floats<BFloat16, BFloat16>(), nullptr},
        {floats<Half, float>(), floats<Half, double>(), nullptr, floats<Half, Half>()},
    };
    if (wire < 0 || type < 0 || wire >= kTypes || type >= kTypes) return nullptr;
    if (wire < 4 && type < 4) return mixed[wire][type];
    if (wire != type) return nullptr;
    switch (type) {
        case kInt8:
            return &sum_of<int8_t, int8_t>;
        case kUInt8:
            return &sum_of<uint8_t, uint8_t>;
        case kInt16:
            return &sum_of<int16_t, int16_t>;
        case kInt32:
            return &sum_of<int32_t, int32_t>;
        case kInt64:
            return &sum_of<int64_t, int64_t>;
        default:
            return nullptr;
    }
}

}  // namespace

size_t type_bytes(int type) {
    static constexpr size_t bytes[kTypes] = {4, 8, 2, 2, 1, 1, 2, 4, 8};
    return bytes[type];
}

bool can_sum(int wire, int type) { return find_sum(wire, type) != nullptr; }

Store store_of(size_t bytes) { return bytes >= kStream ? Store::kPastCaches : Store::kCached; }

void copy(void* target, const void* source, size_t bytes, Store how) {
    if (target == source || bytes == 0) return;
#if defined(__AVX__)
    if (how == Store::kPastCaches) {
        return stream(static_cast<char*>(target), static_cast<const char*>(source), bytes);
    }
#endif
    std::memcpy(target, source, bytes);
}

void sum(void* out, const void* const* rows, int n, size_t count, int wire, int type, double scale, bool accumulate,
         Store how) {
    find_sum(wire, type)(out, rows, n, count, scale, accumulate, how);
}

}  // namespace ze::shm
