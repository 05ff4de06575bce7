// The plain C interface. Addresses are passed as int64; functions return a Status unless said otherwise.
#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <vector>

#include "../ze/export.h"
#include "collectives.h"
#include "kernels.h"
#include "stream.h"

using namespace ze::shm;

namespace {

constexpr size_t kLargePage = size_t{2} << 20;  // one entry of the second level of page tables of 4 KiB
constexpr int kCollapse = 25;                   // MADV_COLLAPSE, Linux 6.1; older headers lack its name

template <class T>
T* pointer(int64_t address) {
    return reinterpret_cast<T*>(address);
}

}  // namespace

// -- memory
// -----------------------------------------------------------------------------------------------------------------

// The address at which `bytes` of the file are mapped, a multiple of kLargePage, or -errno.
ZE_EXPORT int64_t ze_shm_map(int fd, int64_t bytes, int writable) {
    const size_t size = static_cast<size_t>(bytes), room = size + kLargePage;
    void* found = mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return -errno;
    const auto begin = reinterpret_cast<uintptr_t>(found);
    const uintptr_t aligned = (begin + kLargePage - 1) / kLargePage * kLargePage;
    void* at = mmap(pointer<void>(static_cast<int64_t>(aligned)), size, PROT_READ | (writable ? PROT_WRITE : 0),
                    MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd, 0);
    if (at == MAP_FAILED) {
        const int error = errno;
        munmap(found, room);
        return -error;
    }
    if (aligned > begin) munmap(found, aligned - begin);
    const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t end = (aligned + size + page - 1) / page * page;
    if (begin + room > end) munmap(pointer<void>(static_cast<int64_t>(end)), begin + room - end);
    return reinterpret_cast<int64_t>(at);
}

// Gives a range of fresh memory of the file large pages, as far as it holds whole ones, and zeroes one byte of each.
// Its pages exist from now on. 0, or errno where the system has none to give: the range keeps small pages then.
ZE_EXPORT int ze_shm_large_pages(int64_t address, int64_t bytes) {
    const auto begin = static_cast<uintptr_t>(address), end = begin + static_cast<uintptr_t>(bytes);
    const uintptr_t first = (begin + kLargePage - 1) / kLargePage * kLargePage, last = end / kLargePage * kLargePage;
    if (last <= first) return 0;
    // a large page is made of a range that has at least its first small one
    for (uintptr_t at = first; at < last; at += kLargePage) *pointer<volatile char>(static_cast<int64_t>(at)) = 0;
    return madvise(pointer<void>(static_cast<int64_t>(first)), last - first, kCollapse) == 0 ? 0 : errno;
}

ZE_EXPORT int ze_shm_unmap(int64_t address, int64_t bytes) {
    return munmap(pointer<void>(address), static_cast<size_t>(bytes)) == 0 ? 0 : errno;
}

// Gives the pages of a range back to the system, for every process that maps it; they read as zeros afterwards.
ZE_EXPORT int ze_shm_discard(int fd, int64_t offset, int64_t bytes) {
    return fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes) == 0 ? 0 : errno;
}

// -- groups
// -----------------------------------------------------------------------------------------------------------------

namespace {

// The address of what `make` gives; 0 where there is no memory for it: nothing may be thrown through C.
template <class Make>
int64_t made(Make make) {
    try {
        return reinterpret_cast<int64_t>(make());
    } catch (const std::bad_alloc&) {
        return 0;
    }
}

}  // namespace

// Bytes of a control block and its staging area.
ZE_EXPORT int64_t ze_shm_control_bytes(int64_t half) { return Group::control_bytes() + 2 * half; }

ZE_EXPORT void ze_shm_control_clear(int64_t address) { std::memset(pointer<void>(address), 0, Group::control_bytes()); }

ZE_EXPORT int64_t ze_shm_group_new(int size, int rank, const int64_t* bases, const int64_t* controls,
                                   int64_t arena_bytes, int64_t half, int spin) {
    return made([&] { return new Group(size, rank, bases, controls, arena_bytes, half, spin); });
}

// Only when no operation runs.
ZE_EXPORT void ze_shm_group_delete(int64_t group) { delete pointer<Group>(group); }

// Operations of this rank end soon, with kInterrupted. For good.
ZE_EXPORT void ze_shm_interrupt(int64_t group) { pointer<Group>(group)->interrupt(); }

ZE_EXPORT void ze_shm_announce(int64_t group, const int64_t* header, const char* text) {
    pointer<Group>(group)->announce(header, text);
}

// What `rank` announced for the operation that diverged.
ZE_EXPORT void ze_shm_announced(int64_t group, int rank, int64_t* header, char* text) {
    const Slot& slot = pointer<Group>(group)->slot(rank);
    std::memcpy(header, slot.header, sizeof slot.header);
    std::memcpy(text, slot.text, sizeof slot.text);
}

// Whether an operation of this rank would find all others there already. While no operation runs.
ZE_EXPORT int ze_shm_awaited(int64_t group) { return pointer<Group>(group)->awaited() ? 1 : 0; }

ZE_EXPORT int ze_shm_finish(int64_t group) { return pointer<Group>(group)->finish(); }

// -- collectives
// ------------------------------------------------------------------------------------------------------------

ZE_EXPORT int ze_shm_can_sum(int wire, int type) { return can_sum(wire, type) ? 1 : 0; }

ZE_EXPORT int ze_shm_run(int64_t group, const Order* order) { return run(*pointer<Group>(group), *order); }

// Blocks of any sizes.
ZE_EXPORT int ze_shm_all_to_all(int64_t group, int64_t output, int64_t input, const int64_t* input_offset,
                                const int64_t* input_bytes, const int64_t* output_offset, const int64_t* output_bytes,
                                const int64_t* remote, int64_t input_total, int64_t largest) {
    const Blocks blocks{input_offset,
                        input_bytes,
                        output_offset,
                        output_bytes,
                        remote,
                        static_cast<size_t>(input_total),
                        static_cast<size_t>(largest)};
    return all_to_all(*pointer<Group>(group), pointer<char>(output), pointer<char>(input), blocks);
}

// -- streams
// ----------------------------------------------------------------------------------------------------------------

ZE_EXPORT int64_t ze_shm_stream_new(int64_t group) {
    return made([&] { return new Stream(*pointer<Group>(group)); });
}

// When nobody serves it or waits.
ZE_EXPORT void ze_shm_stream_delete(int64_t stream) { delete pointer<Stream>(stream); }

// Whether there was memory for it.
ZE_EXPORT int ze_shm_stream_put(int64_t stream, const Order* order) {
    try {
        pointer<Stream>(stream)->put(*order);
    } catch (const std::bad_alloc&) {
        return 0;
    }
    return 1;
}

// A Turn; `status` of what failed.
ZE_EXPORT int ze_shm_stream_serve(int64_t stream, int* status) {
    Status failed = kDone;
    const Turn turn = pointer<Stream>(stream)->serve(&failed);
    *status = failed;
    return turn;
}

ZE_EXPORT int64_t ze_shm_stream_done(int64_t stream) { return pointer<Stream>(stream)->done(); }

ZE_EXPORT int ze_shm_stream_wait(int64_t stream, int64_t index, double seconds) {
    return pointer<Stream>(stream)->wait(index, seconds) ? 1 : 0;
}

ZE_EXPORT int ze_shm_stream_busy(int64_t stream) { return pointer<Stream>(stream)->busy() ? 1 : 0; }

ZE_EXPORT int ze_shm_stream_span(int64_t stream, int64_t index, double* to) {
    return pointer<Stream>(stream)->span(index, to) ? 1 : 0;
}

ZE_EXPORT void ze_shm_stream_stop(int64_t stream) { pointer<Stream>(stream)->stop(); }

ZE_EXPORT void ze_shm_stream_give_up(int64_t stream) { pointer<Stream>(stream)->give_up(); }

ZE_EXPORT void ze_shm_stream_close(int64_t stream) { pointer<Stream>(stream)->close(); }

// -- for measurements and tests
// ---------------------------------------------------------------------------------------------

// A copy as the collectives make it, for measurements.
ZE_EXPORT void ze_shm_copy(int64_t target, int64_t source, int64_t bytes) {
    copy(pointer<void>(target), pointer<void>(source), static_cast<size_t>(bytes),
         store_of(static_cast<size_t>(bytes)));
}

// A sum as the reductions make it, of `n` rows of this process, for comparisons with its twin.
ZE_EXPORT void ze_shm_sum(int64_t out, const int64_t* rows, int n, int64_t count, int wire, int type, double scale,
                          int accumulate) {
    std::vector<const void*> sources;
    for (int r = 0; r < n; ++r) sources.push_back(pointer<void>(rows[r]));
    sum(pointer<void>(out), sources.data(), n, static_cast<size_t>(count), wire, type, scale, accumulate != 0,
        store_of(static_cast<size_t>(count) * type_bytes(type)));
}
