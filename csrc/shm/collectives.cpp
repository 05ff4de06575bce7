#include "collectives.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

#include "kernels.h"

namespace ze::shm {
namespace {

// Up to this many bytes of all ranks together, every rank adds all contributions: one meeting instead of two.
constexpr size_t kSmallReduce = 256 * 1024;

#define ZE_MEET(source)                    \
    do {                                   \
        const Status met = g.meet(source); \
        if (met != kDone) return met;      \
    } while (false)

size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

// What is left of `total` after `done`, `most` at most.
size_t part(size_t total, size_t done, size_t most) { return done >= total ? 0 : std::min(total - done, most); }

// The part of the staging area for one of `n` blocks.
size_t lane_bytes(const Group& g) { return g.half() / static_cast<size_t>(g.size()) / kLine * kLine; }

// A peer's memory that was read where it lies counts as resident in the reader, too, for as long as it stays mapped
// page by page. The pages are the peer's; dropping this process' entries costs little beside the copy, and so does
// bringing them back, because the kernel maps several around each fault.
constexpr size_t kWorthForgetting = 1024 * 1024;

void forget(const Group& g, int peer, const void* from, size_t bytes) {
    if (peer == g.rank() || !g.direct(peer) || bytes < kWorthForgetting) return;
    const auto begin = reinterpret_cast<uintptr_t>(from);
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t first = (begin + page - 1) / page * page;
    const uintptr_t last = (begin + bytes) / page * page;
    if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

Status close(Group& g, bool direct) { return direct ? g.meet({}) : kDone; }

// Puts bytes [at, at + most) of every block but this rank's own into the staging area, block j at j * most.
Source stage_blocks(Group& g, const char* input, const int64_t* offset, const int64_t* bytes, size_t at, size_t most) {
    char* staged = g.stage();
    for (int j = 0; j < g.size(); ++j) {
        const size_t n = j == g.rank() ? 0 : part(static_cast<size_t>(bytes[j]), at, most);
        if (n != 0) copy(staged + j * most, input + offset[j] + at, n, Store::kCached);
    }
    return g.staged();
}

// Runs `consume(at, most, rows)` until `largest` bytes of every block were seen; rows[p]: bytes from `at` on of the
// block that rank p has for this rank.
template <class Consume>
Status blocks_in_rounds(Group& g, const char* input, const Blocks& b, Consume consume) {
    const size_t lane = lane_bytes(g);
    const Source own = g.source_of(input, b.input_total);
    ZE_MEET(own.direct ? own : stage_blocks(g, input, b.input_offset, b.input_bytes, 0, lane));
    const bool any_direct = g.any_direct();
    const size_t most = g.any_staged() ? lane : b.largest;
    std::vector<const void*> rows(static_cast<size_t>(g.size()));
    for (size_t at = 0; at < b.largest; at += most) {
        if (at != 0) ZE_MEET(own.direct ? own : stage_blocks(g, input, b.input_offset, b.input_bytes, at, lane));
        for (int p = 0; p < g.size(); ++p) {
            rows[p] = g.direct(p) ? g.data(p) + b.remote[p] + at : g.data(p) + g.rank() * lane;
        }
        rows[g.rank()] = input + b.input_offset[g.rank()] + at;
        consume(at, most, rows.data());
        for (int p = 0; p < g.size(); ++p) {
            const size_t whole = b.output_bytes ? static_cast<size_t>(b.output_bytes[p]) : b.largest;
            forget(g, p, rows[p], part(whole, at, most));
        }
    }
    return close(g, any_direct);
}

// Blocks of one size, one for each rank, one after the other.
struct EvenBlocks {
    std::vector<int64_t> offset, bytes, remote;

    EvenBlocks(const Group& g, size_t block) {
        const auto size = static_cast<int64_t>(block);
        for (int p = 0; p < g.size(); ++p) offset.push_back(size * p);
        bytes.assign(offset.size(), size);
        remote.assign(offset.size(), size * g.rank());
    }
};

// Everyone adds everything.
Status small_all_reduce(Group& g, char* data, size_t count, int type, double scale) {
    copy(g.stage(), data, count * type_bytes(type), Store::kCached);
    ZE_MEET(g.staged());
    std::vector<const void*> rows;
    for (int p = 0; p < g.size(); ++p) rows.push_back(g.data(p));
    sum(data, rows.data(), g.size(), count, type, type, scale, false, Store::kCached);
    return kDone;
}

// Both halves of an all-reduce of one piece that every rank has announced as `own`. `result`: where peers find the
// piece.
Status reduce_and_gather(Group& g, char* piece, char* result, size_t count, int type, double scale, Source own,
                         Store how) {
    const size_t item = type_bytes(type), share = ceil_div(count, static_cast<size_t>(g.size()));
    auto begin = [&](int p) { return std::min(static_cast<size_t>(p) * share, count) * item; };
    auto bytes = [&](int p) { return begin(p + 1) - begin(p); };
    const int me = g.rank();
    std::vector<const void*> rows;
    for (int p = 0; p < g.size(); ++p) rows.push_back((p == me ? piece : g.data(p)) + begin(me));
    if (bytes(me) != 0) {
        const Store sums = result == piece ? how : Store::kCached;
        sum(result + begin(me), rows.data(), g.size(), bytes(me) / item, type, type, scale, false, sums);
        copy(piece + begin(me), result + begin(me), bytes(me), how);
        for (int p = 0; p < g.size(); ++p) {
            forget(g, p, g.data(p) + begin(me), bytes(me));
        }
    }
    ZE_MEET(own);
    for (int i = 1; i < g.size(); ++i) {
        const int p = (me + i) % g.size();
        copy(piece + begin(p), g.data(p) + begin(p), bytes(p), how);
        forget(g, p, g.data(p) + begin(p), bytes(p));
    }
    return kDone;
}

}  // namespace

Status all_gather(Group& g, char* full, const char* shard, size_t bytes) {
    const Source own = g.source_of(shard, bytes);
    auto stage = [&](size_t at) {
        const size_t n = part(bytes, at, g.half());
        copy(g.stage(), shard + at, n, Store::kCached);
        return g.staged();
    };
    ZE_MEET(own.direct ? own : stage(0));
    const bool any_direct = g.any_direct();
    const size_t most = g.any_staged() ? g.half() : bytes;
    const Store how = store_of(bytes);  // by the shard: a whole of 4 MiB that is used at once stays cached
    for (size_t at = 0; at < bytes; at += most) {
        if (at != 0) ZE_MEET(own.direct ? own : stage(at));
        copy(full + g.rank() * bytes + at, shard + at, part(bytes, at, most), how);  // staged: it is in the cache
        for (int i = 1; i < g.size(); ++i) {
            const int p = (g.rank() + i) % g.size();
            const char* from = g.data(p) + (g.direct(p) ? at : 0);
            copy(full + p * bytes + at, from, part(bytes, at, most), how);
            forget(g, p, from, part(bytes, at, most));
        }
    }
    return close(g, any_direct);
}

Status reduce_scatter(Group& g, char* out, const char* full, size_t count, int wire, int type, double scale,
                      bool accumulate) {
    const size_t slice = count * type_bytes(wire);
    const EvenBlocks even(g, slice);
    const Blocks blocks{even.offset.data(),
                        even.bytes.data(),
                        nullptr,
                        nullptr,
                        even.remote.data(),
                        slice * static_cast<size_t>(g.size()),
                        slice};
    const Store how = store_of(count * type_bytes(type));
    return blocks_in_rounds(g, full, blocks, [&](size_t at, size_t most, const void* const* rows) {
        const size_t first = at / type_bytes(wire);
        const size_t here = part(slice, at, most) / type_bytes(wire);
        sum(out + first * type_bytes(type), rows, g.size(), here, wire, type, scale, accumulate, how);
    });
}

Status all_reduce(Group& g, char* data, size_t count, int type, double scale) {
    const size_t item = type_bytes(type), bytes = count * item;
    if (bytes * static_cast<size_t>(g.size()) <= kSmallReduce && bytes <= g.half()) {
        return small_all_reduce(g, data, count, type, scale);
    }
    const Source own = g.source_of(data, bytes);
    const size_t piece = g.half() / item;
    char* staged = nullptr;
    auto stage = [&](size_t first) {
        staged = g.stage();
        const size_t n = part(count, first, piece) * item;
        copy(staged, data + first * item, n, Store::kCached);
        return g.staged();
    };
    Source source = own.direct ? own : stage(0);
    ZE_MEET(source);
    const bool any_direct = g.any_direct();
    const size_t most = g.any_staged() ? piece : count;
    for (size_t first = 0; first < count; first += most) {
        if (first != 0) {
            source = own.direct ? Source{1, own.offset + static_cast<int64_t>(first * item)} : stage(first);
            ZE_MEET(source);
        }
        char* here = data + first * item;
        const Status done = reduce_and_gather(g, here, own.direct ? here : staged, part(count, first, most), type,
                                              scale, source, store_of(bytes / static_cast<size_t>(g.size())));
        if (done != kDone) return done;
    }
    return close(g, any_direct);
}

Status broadcast(Group& g, char* data, size_t bytes, int src) {
    const bool mine = g.rank() == src;
    const Source own = mine ? g.source_of(data, bytes) : Source{};
    auto stage = [&](size_t at) {
        if (!mine || own.direct) return own;
        const size_t n = part(bytes, at, g.half());
        copy(g.stage(), data + at, n, Store::kCached);
        return g.staged();
    };
    ZE_MEET(stage(0));
    const bool direct = g.direct(src);
    const size_t most = direct ? bytes : g.half();
    for (size_t at = 0; at < bytes; at += most) {
        if (at != 0) ZE_MEET(stage(at));
        if (!mine) copy(data + at, g.data(src), part(bytes, at, most), store_of(bytes));
        forget(g, src, g.data(src), part(bytes, at, most));
    }
    return close(g, direct);
}

Status all_to_all(Group& g, char* output, const char* input, const Blocks& b) {
    const Store how = store_of(b.largest);
    return blocks_in_rounds(g, input, b, [&](size_t at, size_t most, const void* const* rows) {
        for (int i = 0; i < g.size(); ++i) {
            const int p = (g.rank() + i) % g.size();
            const size_t n = part(static_cast<size_t>(b.output_bytes[p]), at, most);
            if (n != 0) copy(output + b.output_offset[p] + at, rows[p], n, how);
        }
    });
}

Status all_to_all(Group& g, char* output, const char* input, size_t block) {
    const EvenBlocks even(g, block);
    const Blocks blocks{even.offset.data(),
                        even.bytes.data(),
                        even.offset.data(),
                        even.bytes.data(),
                        even.remote.data(),
                        block * static_cast<size_t>(g.size()),
                        block};
    return all_to_all(g, output, input, blocks);
}

}  // namespace ze::shm
