// Memory of large CPU tensors: an allocator that torch is given in the place of its own (c10::SetCPUAllocator).
//
// glibc's aligned allocation asks for a little more than it returns and cuts the rest off, so what was freed does not
// serve a block of the same size again once something small lies in what was cut off. Here blocks of all sizes fit to
// the byte, and their pages stay with the process.
//
// Includes headers of c10, so a build belongs to one torch. The plain C interface: see zeroengine/ops/heap.py.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <mutex>
#include <new>

#include "../ze/export.h"
#include "blocks.h"

namespace ze::heap {
namespace {

constexpr size_t kSmallest = 64 << 10;  // smaller blocks are left to torch's own allocator
constexpr size_t kSteps = 16;           // a peak is remembered for so many
constexpr size_t kSpare = 64 << 20;     // kept beyond the peak, whatever the proportion
constexpr size_t kLargePage = 2 << 20;  // of x86-64, and of Arm with pages of 4 KiB

// Beside errno values, which are positive.
enum Answer : int { kInstalled = 0, kOther = -1 };

// Lives as long as the process: tensors may be freed after everything else has ended.
class Heap final : public c10::Allocator {
  public:
    Heap(char* base, size_t bytes, size_t page, c10::Allocator* small)
        : base_(base), bytes_(bytes), small_(small), blocks_(base, page) {}

    c10::DataPtr allocate(size_t n) override {
        void* memory = n < kSmallest ? nullptr : take(n);
        if (memory != nullptr) {
            c10::profiledCPUMemoryReporter().New(memory, n);
        } else {
            memory = small_->raw_allocate(n);  // also where there is no room: torch's error is what users know
        }
        return {memory, memory, &Heap::release, c10::Device(c10::DeviceType::CPU)};
    }

    c10::DeleterFnPtr raw_deleter() const override { return &Heap::release; }

    void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }

    void trim() {
        const std::lock_guard<std::mutex> lock(mutex_);
        blocks_.trim();
    }

    // Trims if what is kept is far beyond the peaks of the last steps, of which all are later than the last trim: the
    // process does not keep for ever what one evaluation took, and does not give back in every step what the next
    // takes.
    void step_ended() {
        const std::lock_guard<std::mutex> lock(mutex_);
        peaks_[steps_ % kSteps] = peak_;
        peak_ = blocks_.live();
        if (++steps_ < kSteps) return;
        const size_t largest = *std::max_element(peaks_.begin(), peaks_.end());
        if (blocks_.kept() <= largest + std::max(largest / 2, kSpare)) return;
        blocks_.trim();
        steps_ = 0;
    }

    void stats(int64_t* to) {
        const std::lock_guard<std::mutex> lock(mutex_);
        to[0] = static_cast<int64_t>(blocks_.live());
        to[1] = static_cast<int64_t>(blocks_.kept());
        to[2] = static_cast<int64_t>(peak_);
    }

    // A fork in the middle of another thread's allocation would leave the child a lock that nobody opens.
    void lock() { mutex_.lock(); }
    void unlock() { mutex_.unlock(); }

    c10::Allocator* small() const { return small_; }

  private:
    void* take(size_t n) {
        if (n > bytes_) return nullptr;
        const std::lock_guard<std::mutex> lock(mutex_);
        try {
            const size_t size = up(n, kLine);
            void* memory = blocks_.take(size);
            if (memory == nullptr && open(size - blocks_.tail())) memory = blocks_.take(size);
            peak_ = std::max(peak_, blocks_.live());
            return memory;
        } catch (const std::bad_alloc&) {
            return nullptr;
        }
    }

    // Makes `bytes` more of the range usable, in large pages. Only what is usable counts against a limit of the
    // process' data (`ulimit -d`), which refuses here.
    bool open(size_t bytes) {
        if (bytes > bytes_ - opened_) return false;
        const size_t more = std::min(up(bytes, kLargePage), bytes_ - opened_);
        if (mprotect(base_ + opened_, more, PROT_READ | PROT_WRITE) != 0) return false;
        opened_ += more;
        blocks_.grow(more);
        return true;
    }

    static void release(void* memory);

    char* const base_;
    const size_t bytes_;
    c10::Allocator* const small_;
    std::mutex mutex_;
    Blocks blocks_;
    size_t opened_ = 0;
    size_t peak_ = 0;
    size_t steps_ = 0;  // since the last trim of `step_ended`
    std::array<size_t, kSteps> peaks_{};
};

Heap* heap = nullptr;

void Heap::release(void* memory) {
    if (memory == nullptr) return;
    if (static_cast<char*>(memory) < heap->base_ || static_cast<char*>(memory) >= heap->base_ + heap->bytes_) {
        heap->small_->raw_deallocate(memory);
        return;
    }
    c10::profiledCPUMemoryReporter().Delete(memory);
    const std::lock_guard<std::mutex> lock(heap->mutex_);
    heap->blocks_.release(static_cast<const char*>(memory));
}

// The heap of this process; errno where the system gives no range of `bytes`.
int make(size_t bytes, c10::Allocator* small) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t whole = down(bytes, page), room = whole + kLargePage;
    void* found = mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return errno;
    void* base = reinterpret_cast<void*>(up(reinterpret_cast<uintptr_t>(found), kLargePage));
    madvise(base, whole, MADV_HUGEPAGE);  // where the system has none, pages stay small
    try {
        heap = new Heap(static_cast<char*>(base), whole, page, small);
    } catch (const std::bad_alloc&) {
        munmap(found, room);
        return ENOMEM;
    }
    pthread_atfork([] { heap->lock(); }, [] { heap->unlock(); }, [] { heap->unlock(); });
    return 0;
}

}  // namespace
}  // namespace ze::heap

using ze::heap::heap;

// Gives torch the allocator, over a range of `bytes`; nothing new where it has it. Not for several threads at once, as
// c10::SetCPUAllocator. kInstalled, kOther where torch has another allocator than its own, or an errno.
ZE_EXPORT int ze_heap_install(int64_t bytes) {
    if (heap != nullptr && c10::GetCPUAllocator() == heap) return ze::heap::kInstalled;
    c10::Allocator* own = c10::GetDefaultCPUAllocator();
    if (c10::GetCPUAllocator() != own || own->raw_deleter() == nullptr) return ze::heap::kOther;
    if (heap == nullptr) {
        if (const int error = ze::heap::make(static_cast<size_t>(bytes), own); error != 0) return error;
    }
    c10::SetCPUAllocator(heap);
    return c10::GetCPUAllocator() == heap ? ze::heap::kInstalled : ze::heap::kOther;
}

// Gives torch its own allocator back, unless it has got another one since. Tensors stay valid.
ZE_EXPORT void ze_heap_uninstall() {
    if (heap != nullptr && c10::GetCPUAllocator() == heap) c10::SetCPUAllocator(heap->small());
}

ZE_EXPORT void ze_heap_trim() {
    if (heap != nullptr) heap->trim();
}

ZE_EXPORT void ze_heap_step_ended() {
    if (heap != nullptr) heap->step_ended();
}

// Bytes live, bytes of pages that have memory, and the most bytes live since the last step ended.
ZE_EXPORT void ze_heap_stats(int64_t* to) {
    std::fill_n(to, 3, 0);
    if (heap != nullptr) heap->stats(to);
}
