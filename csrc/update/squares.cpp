// Sum of squares and count of non-finite elements in one read.
//
// The sum is in double precision and in an order that depends on the number of elements only: halves are added to each
// other within a block, then halves of the row of blocks. It is the same for every number of threads, address and
// vector width.

#include <vector>

#include "ze/convert.h"
#include "ze/export.h"
#include "ze/parallel.h"
#include "ze/segments.h"

namespace {

using namespace ze;

// Adds the upper half to the lower one until one is left.
double fold(double* values, int64_t n) {
    while (n > 1) {
        const int64_t half = (n + 1) / 2;
        for (int64_t i = 0; i < n - half; ++i) values[i] += values[i + half];
        n = half;
    }
    return values[0];
}

constexpr int kLanes = 8;
typedef float Floats __attribute__((vector_size(kLanes * 4), aligned(4)));
typedef double Doubles __attribute__((vector_size(kLanes * 8)));

// What `fold` would leave of the squares in every lane, in registers: vectors j, j + kStride, j + 2 * kStride, ... of a
// block.
template <int kStride>
inline Doubles squares_of(const float* x, int j) {
    if constexpr (kStride * kLanes == kBlock) {
        const Doubles wide = __builtin_convertvector(*reinterpret_cast<const Floats*>(x + j * kLanes), Doubles);
        return wide * wide;
    } else {
        return squares_of<2 * kStride>(x, j) + squares_of<2 * kStride>(x, j + kStride);
    }
}

double square_block(const float* x, int64_t n, int64_t* bad) {
    alignas(64) float padded[kBlock];
    if (n < kBlock) {
        memcpy(padded, x, size_t(n) * 4);
        memset(padded + n, 0, size_t(kBlock - n) * 4);
        x = padded;
    }
    // First in the order of the memory, which is faster to read so; then the block is in the nearest cache.
    int32_t found = 0;
    for (int64_t i = 0; i < kBlock; ++i) found += (bits_of(x[i]) & 0x7f800000u) == 0x7f800000u;
    *bad = found;
    Doubles sums = squares_of<1>(x, 0);
    double lanes[kLanes];
    memcpy(lanes, &sums, sizeof lanes);
    return fold(lanes, kLanes);
}

}  // namespace

// sums[i] and bad[i] of each row.
ZE_EXPORT int ze_squares(const Read* rows, int64_t count, double* sums, int64_t* bad, int threads) {
    std::vector<int64_t> first(size_t(count) + 1, 0);
    for (int64_t i = 0; i < count; ++i) first[i + 1] = first[i] + (rows[i].count + kBlock - 1) / kBlock;
    std::vector<double> partial(size_t(first[count]));
    std::vector<int64_t> found(size_t(first[count]));
    for_blocks(rows, count, threads, [&](int64_t i, int64_t begin, int64_t end) {
        alignas(64) float buffer[kBlock];
        const int64_t b = first[i] + begin / kBlock;
        partial[b] =
            square_block(load(rows[i].source, int(rows[i].kind), begin, end - begin, buffer), end - begin, &found[b]);
    });
    for (int64_t i = 0; i < count; ++i) {
        const int64_t blocks = first[i + 1] - first[i];
        sums[i] = blocks > 0 ? fold(partial.data() + first[i], blocks) : 0.0;
        bad[i] = 0;
        for (int64_t b = first[i]; b < first[i + 1]; ++b) bad[i] += found[b];
    }
    return 0;
}
