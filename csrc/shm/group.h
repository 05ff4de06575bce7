// A group of processes of one host that share memory: control blocks, and the meeting of all ranks.
//
// Every rank has one mapped file (its arena), which its peers map, too. A rank's control block and its staging area lie
// in its own arena; nobody writes into the memory of another rank but for the count of those who sleep.
//
// All communication is a sequence of meetings. At meeting q a rank announces what its peers may read (a source, and at
// the first meeting of an operation its header), and returns when all ranks have announced theirs. A rank announces
// meeting q+1 only when it has finished reading what was announced for q. Hence, when meeting q+1 is over:
//   - nobody reads the sources of meeting q any more, and
//   - a slot or a half of the staging area that was used at meeting q may be written for meeting q+2.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ze::shm {

constexpr int kHeaderWords = 6;
constexpr int kTextBytes = 256;
constexpr size_t kLine = 64;

enum Status : int { kDone = 0, kDiverged = 1, kInterrupted = 2 };

// What a rank lets its peers read from one meeting to the next. `offset` counts from the start of its arena.
struct Source {
    int64_t direct = 0;  // the caller's own memory, which must not change before the closing meeting; else staging
    int64_t offset = 0;
};

struct alignas(kLine) Slot {
    Source source;
    int64_t header[kHeaderWords];
    char text[kTextBytes];
};

struct Control {
    alignas(kLine) std::atomic<uint32_t> meeting;   // the last meeting that this rank has announced; a futex
    alignas(kLine) std::atomic<uint32_t> sleepers;  // processes that sleep on it
    Slot slots[2];
};

static_assert(std::atomic<uint32_t>::is_always_lock_free, "a futex is a plain 32-bit word");

class Group {
  public:
    // `bases`: where the arenas of all ranks are mapped here; `controls`: offsets of the control blocks in them, each
    // followed by two halves of staging of `half` bytes.
    Group(int size, int rank, const int64_t* bases, const int64_t* controls, int64_t arena_bytes, int64_t half,
          int spin);

    static int64_t control_bytes() { return sizeof(Control); }  // a multiple of kLine

    int size() const { return size_; }
    int rank() const { return rank_; }
    size_t half() const { return half_; }

    // The next meeting is the first one of an operation: `header` is compared with those of all ranks.
    void announce(const int64_t* header, const char* text);
    // Meets without data unless the operation that was announced has met already.
    Status finish() { return announced_ ? meet({}) : kDone; }
    Status meet(Source source);

    // The half of the staging area to write next; it belongs to the next meeting.
    char* stage();
    Source staged() const { return {0, staging_offset()}; }
    // Where peers find `data` in this rank's arena; staged() when it lies elsewhere.
    Source source_of(const void* data, size_t bytes) const;

    // Whether all others have announced the meeting that this rank comes to next.
    bool awaited() const;

    bool direct(int rank) const { return slot(rank).source.direct != 0; }
    bool any_direct() const;
    bool any_staged() const;
    const char* data(int rank) const { return bases_[rank] + slot(rank).source.offset; }
    const Slot& slot(int rank) const { return controls_[rank]->slots[meeting_ & 1]; }

    void interrupt() { interrupted_.store(1, std::memory_order_relaxed); }

  private:
    int64_t staging_offset() const;
    bool wait_for(Control& peer, uint32_t meeting);
    bool agreed() const;

    int size_, rank_;
    std::vector<char*> bases_;
    std::vector<Control*> controls_;
    std::vector<int64_t> offsets_;
    size_t arena_bytes_, half_;
    int spin_;
    uint32_t meeting_ = 0;
    uint32_t turn_ = 0;
    bool announced_ = false;
    std::atomic<int> interrupted_{0};
};

}  // namespace ze::shm
