// Work over the elements of many segments, divided evenly over threads wherever the borders of segments lie.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ze {

constexpr int64_t kBlock = 1024;           // elements that are in the nearest cache together
constexpr int64_t kThreadShare = 1 << 15;  // elements that are worth waking a thread

// Calls work(row, begin, end) for pieces of at most kBlock elements. Pieces begin at multiples of kBlock from the
// beginning of their row, whatever the number of threads.
template <class Row, class Work>
void for_blocks(const Row* rows, int64_t count, int threads, Work&& work) {
    int64_t blocks = 0;
    for (int64_t i = 0; i < count; ++i) blocks += (rows[i].count + kBlock - 1) / kBlock;
    const int64_t useful = std::max<int64_t>(1, blocks * kBlock / kThreadShare);
    const int team = int(std::min<int64_t>(std::max(threads, 1), useful));
#pragma omp parallel for num_threads(team) schedule(static) if (team > 1)
    for (int t = 0; t < team; ++t) {
        const int64_t first = blocks * t / team, last = blocks * (t + 1) / team;
        int64_t before = 0;  // blocks of the rows so far
        for (int64_t i = 0; i < count && before < last; ++i) {
            const int64_t here = (rows[i].count + kBlock - 1) / kBlock;
            const int64_t from = std::max(first, before) - before, to = std::min(last, before + here) - before;
            for (int64_t b = from; b < to; ++b) {
                work(i, b * kBlock, std::min(rows[i].count, (b + 1) * kBlock));
            }
            before += here;
        }
    }
}

}  // namespace ze
