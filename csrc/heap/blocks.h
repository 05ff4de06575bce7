// Blocks of one range of memory: best fit from both ends, free neighbours become one, and which pages of free blocks
// have memory.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>
#include <set>
#include <utility>

namespace ze::heap {

constexpr size_t kLine = 64;        // alignment of blocks, as torch's
constexpr size_t kUpper = 1 << 20;  // blocks from this size on lie at the upper end of the hole that they are cut from

inline size_t up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }
inline size_t down(size_t n, size_t unit) { return n / unit * unit; }

// Pages without memory, as disjoint stretches [first byte, end) that do not touch.
class Bare {
  public:
    size_t bytes() const { return bytes_; }

    // Pages [begin, end) are about to be written.
    void remove(size_t begin, size_t end) {
        auto at = stretches_.upper_bound(begin);
        if (at != stretches_.begin() && std::prev(at)->second > begin) --at;
        while (at != stretches_.end() && at->first < end) {
            const auto [from, to] = *at;
            if (to > end) stretches_.emplace(end, to);
            bytes_ -= std::min(to, end) - std::max(from, begin);
            if (from < begin) {
                at->second = begin;
                ++at;
            } else {
                at = stretches_.erase(at);
            }
        }
    }

    // Calls `act(begin, end)` for what of [begin, end) has memory, after which it has none.
    template <typename Act>
    void add(size_t begin, size_t end, Act act) {
        size_t from = begin, first = begin, last = end;
        auto at = stretches_.upper_bound(begin);
        if (at != stretches_.begin() && std::prev(at)->second >= begin) --at;
        while (at != stretches_.end() && at->first <= end) {
            if (at->first > from) act(from, at->first), bytes_ += at->first - from;
            from = std::max(from, at->second);
            first = std::min(first, at->first);
            last = std::max(last, at->second);
            at = stretches_.erase(at);
        }
        if (from < end) act(from, end), bytes_ += end - from;
        stretches_.emplace(first, last);
    }

  private:
    std::map<size_t, size_t> stretches_;
    size_t bytes_ = 0;
};

// Not for several threads at once. It has no memory before `grow`. Offsets and sizes are multiples of kLine; `release`
// takes no memory of its own.
class Blocks {
  public:
    Blocks(char* base, size_t page) : base_(base), page_(page) {}

    // Whole pages beyond its end that have not been written yet. Throws std::bad_alloc, and has no more then.
    void grow(size_t bytes) {
        if (const size_t free = tail(); free != 0) {
            const auto last = std::prev(blocks_.end());
            auto place = fits_.extract({free, last->first});
            place.value().first += bytes;
            fits_.insert(std::move(place));
            last->second.size += bytes;
        } else {
            const auto place = fits_.emplace(bytes, bytes_).first;
            try {
                blocks_.emplace(bytes_, Block{bytes, true, {}});
            } catch (...) {
                fits_.erase(place);
                throw;
            }
        }
        const size_t before = bytes_;
        bytes_ += bytes;
        bare_.add(before, bytes_, [](size_t, size_t) {});
    }

    // Free bytes at its end.
    size_t tail() const {
        if (blocks_.empty() || !blocks_.rbegin()->second.free) return 0;
        return blocks_.rbegin()->second.size;
    }

    // A block of `size` bytes or null. The smallest free block that is large enough, the first of several, and
    // the one at the end only if there is no other: what lies low is used again before anything above it. Blocks of
    // kUpper and more are cut from the upper end of a hole and smaller ones from the lower end, so that a small one
    // that stays does not cut through what a large one leaves; at the end all are cut from the lower one. Throws
    // std::bad_alloc, and has taken nothing then.
    char* take(size_t size) {
        auto fit = fits_.lower_bound({size, 0});
        if (fit == fits_.end()) return nullptr;
        if (ends(*fit) && std::next(fit) != fits_.end()) ++fit;
        const size_t begin = fit->second, rest = fit->first - size;
        const bool upper = size >= kUpper && !ends(*fit);
        const size_t offset = upper ? begin + rest : begin;
        bare_.remove(down(offset, page_), up(offset + size, page_));
        if (rest != 0) {
            const auto other = fits_.emplace(rest, upper ? begin : offset + size).first;
            try {
                blocks_.emplace(upper ? offset : offset + size, Block{upper ? size : rest, true, {}});
            } catch (...) {
                fits_.erase(other);
                throw;
            }
            if (upper) blocks_.find(begin)->second.size = rest;
        }
        Block& block = blocks_.find(offset)->second;
        block.size = size;
        block.free = false;
        block.place = fits_.extract(fit);
        live_ += size;
        return base_ + offset;
    }

    void release(const char* memory) {
        auto at = blocks_.find(static_cast<size_t>(memory - base_));
        live_ -= at->second.size;
        auto place = std::move(at->second.place);
        at->second.free = true;
        if (const auto next = std::next(at); next != blocks_.end() && next->second.free) swallow(at, next);
        if (at != blocks_.begin() && std::prev(at)->second.free) {
            const auto before = std::prev(at);
            fits_.erase({before->second.size, before->first});
            before->second.size += at->second.size;
            blocks_.erase(at);
            at = before;
        }
        place.value() = {at->second.size, at->first};
        fits_.insert(std::move(place));
    }

    // Gives whole pages of free blocks back to the system.
    void trim() {
        for (const auto& [offset, block] : blocks_) {
            if (!block.free) continue;
            const size_t begin = up(offset, page_), end = down(offset + block.size, page_);
            if (begin >= end) continue;
            bare_.add(begin, end, [this](size_t from, size_t to) { madvise(base_ + from, to - from, MADV_DONTNEED); });
        }
    }

    size_t live() const { return live_; }

    // Bytes of pages that were written since they were given back: live ones, and free ones that are kept.
    size_t kept() const { return bytes_ - bare_.bytes(); }

  private:
    using Fits = std::set<std::pair<size_t, size_t>>;  // (size, offset) of free blocks

    struct Block {
        size_t size;
        bool free;
        Fits::node_type place;  // of a block in use: what puts it among the free ones again
    };
    using Map = std::map<size_t, Block>;  // by offset; one ends where the next begins

    bool ends(const std::pair<size_t, size_t>& fit) const { return fit.second + fit.first == bytes_; }

    void swallow(Map::iterator at, Map::iterator next) {
        fits_.erase({next->second.size, next->first});
        at->second.size += next->second.size;
        blocks_.erase(next);
    }

    char* base_;
    size_t page_, bytes_ = 0, live_ = 0;
    Map blocks_;
    Fits fits_;
    Bare bare_;
};

}  // namespace ze::heap
