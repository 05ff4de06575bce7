#include "group.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <cstring>
#include <ctime>
#include <new>

namespace ze::shm {
namespace {

// A sleep ends after this time at the latest, to look whether the wait was given up.
constexpr long kSliceNanoseconds = 50'000'000;

void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t value) {
    timespec slice{0, kSliceNanoseconds};
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, &slice, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

Group::Group(int size, int rank, const int64_t* bases, const int64_t* controls, int64_t arena_bytes, int64_t half,
             int spin)
    : size_(size),
      rank_(rank),
      arena_bytes_(static_cast<size_t>(arena_bytes)),
      half_(static_cast<size_t>(half)),
      spin_(spin) {
    for (int r = 0; r < size; ++r) {
        bases_.push_back(reinterpret_cast<char*>(bases[r]));
        offsets_.push_back(controls[r]);
        controls_.push_back(reinterpret_cast<Control*>(bases_[r] + controls[r]));
    }
}

void Group::announce(const int64_t* header, const char* text) {
    Slot& mine = controls_[rank_]->slots[(meeting_ + 1) & 1];
    std::memcpy(mine.header, header, sizeof mine.header);
    std::memcpy(mine.text, text, sizeof mine.text);
    announced_ = true;
}

Status Group::meet(Source source) {
    Control& mine = *controls_[rank_];
    const uint32_t next = meeting_ + 1;
    mine.slots[next & 1].source = source;
    // Sequentially consistent with the sleepers' "count myself, then look at the word": either they see the new word or
    // their count is seen here.
    mine.meeting.store(next, std::memory_order_seq_cst);
    if (mine.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(mine.meeting);
    meeting_ = next;
    for (int i = 1; i < size_; ++i) {
        if (!wait_for(*controls_[(rank_ + i) % size_], next)) return kInterrupted;
    }
    if (announced_) {
        announced_ = false;
        if (!agreed()) return kDiverged;
    }
    return kDone;
}

bool Group::wait_for(Control& peer, uint32_t meeting) {
    // A peer is at most one meeting ahead; the difference is signed because the count wraps around.
    auto behind = [&] { return static_cast<int32_t>(peer.meeting.load(std::memory_order_acquire) - meeting) < 0; };
    for (int i = 0; i < spin_; ++i) {
        if (!behind()) return true;
        pause();
    }
    bool there = !behind();
    if (there) return true;
    peer.sleepers.fetch_add(1, std::memory_order_seq_cst);
    while (!there && interrupted_.load(std::memory_order_relaxed) == 0) {
        const uint32_t seen = peer.meeting.load(std::memory_order_seq_cst);
        there = static_cast<int32_t>(seen - meeting) >= 0;
        if (!there) futex_wait(peer.meeting, seen);
    }
    peer.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    return there;
}

bool Group::agreed() const {
    for (int r = 0; r < size_; ++r) {
        if (std::memcmp(slot(r).header, slot(rank_).header, sizeof slot(r).header) != 0) return false;
    }
    return true;
}

bool Group::awaited() const {
    for (int r = 0; r < size_; ++r) {
        if (r == rank_) continue;
        const uint32_t theirs = controls_[r]->meeting.load(std::memory_order_acquire);
        if (static_cast<int32_t>(theirs - meeting_) <= 0) return false;
    }
    return true;
}

char* Group::stage() {
    ++turn_;
    return bases_[rank_] + staging_offset();
}

int64_t Group::staging_offset() const {
    return offsets_[rank_] + control_bytes() + static_cast<int64_t>((turn_ & 1) * half_);
}

Source Group::source_of(const void* data, size_t bytes) const {
    const char* p = static_cast<const char*>(data);
    const char* base = bases_[rank_];
    if (p < base || p + bytes > base + arena_bytes_) return {};
    return {1, p - base};
}

bool Group::any_direct() const {
    for (int r = 0; r < size_; ++r) {
        if (direct(r)) return true;
    }
    return false;
}

bool Group::any_staged() const {
    for (int r = 0; r < size_; ++r) {
        if (!direct(r)) return true;
    }
    return false;
}

}  // namespace ze::shm
