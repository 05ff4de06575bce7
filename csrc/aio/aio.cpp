// Asynchronous reads and writes of files: a pool of threads, each with one block of a request in flight. A block is
// summed while it is in the cache of its thread: before it is written, after it was read.
//
// The plain C interface: addresses are passed as int64; see zeroengine/ops/aio.py for the other side.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "../ze/export.h"
#include "checksum.h"
#include "copy.h"
#include "crc32.h"

namespace ze::aio {
namespace {

enum Action : int { kRead = 0, kWrite = 1, kSum = 2 };
// Errors beside errno values, which are positive.
enum Fault : int { kShort = -1, kDamaged = -2 };

// One request: `bytes` of the file at `offset` from or to `address`, in blocks of `block` bytes with a checksum each.
struct Request {
    int action, fd;
    char* address;
    int64_t offset, bytes, block;
    uint64_t* sums;

    int64_t next = 0;  // byte of the first block that no thread has taken
    int running = 0;   // blocks that threads are at
    int error = 0;     // of the first block that failed
    int64_t error_at = 0;

    bool taken() const { return error != 0 || next >= bytes; }
    bool finished() const { return taken() && running == 0; }
};

// The whole range, however the system cuts it.
int move(const Request& r, int64_t at, int64_t bytes) {
    char* memory = r.address + at;
    int64_t done = 0;
    while (done < bytes) {
        const ssize_t n = r.action == kWrite
                              ? pwrite(r.fd, memory + done, static_cast<size_t>(bytes - done), r.offset + at + done)
                              : pread(r.fd, memory + done, static_cast<size_t>(bytes - done), r.offset + at + done);
        if (n < 0 && errno == EINTR) continue;
        // Direct transfers go on at a multiple of the sector only, so what was cut short before cannot.
        const bool ends = n == 0 || (n < 0 && errno == EINVAL && done > 0);
        if (ends) return r.action == kWrite ? ENOSPC : kShort;
        if (n < 0) return errno;
        done += n;
    }
    return 0;
}

int run(const Request& r, int64_t at) {
    const int64_t bytes = std::min(r.block, r.bytes - at);
    uint64_t& sum = r.sums[at / r.block];
    if (r.action == kWrite) sum = checksum(r.address + at, static_cast<size_t>(bytes));
    if (const int error = move(r, at, bytes); error != 0) return error;
    if (r.action == kWrite) return 0;
    const uint64_t found = checksum(r.address + at, static_cast<size_t>(bytes));
    if (r.action == kSum) sum = found;
    return found == sum ? 0 : kDamaged;
}

class Pool {
  public:
    explicit Pool(int threads) {
        try {
            for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
        } catch (...) {  // the system gives no more: those that run must end before their memory goes
            end();
            throw;
        }
    }

    ~Pool() { end(); }

    void submit(Request* request) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            waiting_.push_back(request);
        }
        wake_.notify_all();
    }

    bool done(const Request* request) {
        const std::lock_guard<std::mutex> lock(mutex_);
        return request->finished();
    }

    void wait(const Request* request) {
        std::unique_lock<std::mutex> lock(mutex_);
        finished_.wait(lock, [request] { return request->finished(); });
    }

  private:
    void end() {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            ending_ = true;
        }
        wake_.notify_all();
        for (std::thread& thread : threads_) thread.join();
    }

    void work() {
        std::unique_lock<std::mutex> lock(mutex_);
        while (true) {
            wake_.wait(lock, [this] { return ending_ || !waiting_.empty(); });
            if (waiting_.empty()) return;
            Request* request = waiting_.front();
            if (request->taken()) {
                waiting_.pop_front();
                continue;
            }
            const int64_t at = request->next;
            request->next += request->block;
            if (request->taken()) waiting_.pop_front();
            ++request->running;
            lock.unlock();
            const int error = run(*request, at);
            lock.lock();
            --request->running;
            if (error != 0 && request->error == 0) {
                request->error = error;
                request->error_at = at;
                waiting_.erase(std::remove(waiting_.begin(), waiting_.end(), request), waiting_.end());
            }
            if (request->finished()) finished_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_, finished_;
    std::deque<Request*> waiting_;
    std::vector<std::thread> threads_;
    bool ending_ = false;
};

}  // namespace
}  // namespace ze::aio

using namespace ze::aio;

ZE_EXPORT int64_t ze_aio_new(int threads) {
    try {
        return reinterpret_cast<int64_t>(new Pool(std::max(threads, 1)));
    } catch (...) {  // no thread to be had; nothing may be thrown through C
        return 0;
    }
}

// Requests that were submitted are finished first.
ZE_EXPORT void ze_aio_delete(int64_t pool) { delete reinterpret_cast<Pool*>(pool); }

// `sums`: one word for each block, read (action 0) or written (1 and 2). All memory stays until `ze_aio_end`.
ZE_EXPORT int64_t ze_aio_begin(int64_t pool, int action, int fd, int64_t address, int64_t offset, int64_t bytes,
                               int64_t block, int64_t sums) {
    Request* request = new Request{action, fd,    reinterpret_cast<char*>(address), offset,
                                   bytes,  block, reinterpret_cast<uint64_t*>(sums)};
    if (bytes > 0) reinterpret_cast<Pool*>(pool)->submit(request);
    return reinterpret_cast<int64_t>(request);
}

ZE_EXPORT int ze_aio_done(int64_t pool, int64_t request) {
    return reinterpret_cast<Pool*>(pool)->done(reinterpret_cast<Request*>(request)) ? 1 : 0;
}

// Waits, and frees the request. 0, an errno, or a Fault; `at` gets the byte of the request where the failed block
// begins.
ZE_EXPORT int ze_aio_end(int64_t pool, int64_t handle, int64_t* at) {
    Request* request = reinterpret_cast<Request*>(handle);
    reinterpret_cast<Pool*>(pool)->wait(request);
    const int error = request->error;
    *at = request->error_at;
    delete request;
    return error;
}

ZE_EXPORT uint64_t ze_aio_checksum(int64_t address, int64_t bytes) {
    return checksum(reinterpret_cast<const void*>(address), static_cast<size_t>(bytes));
}

// Whether `ze_aio_crc32` uses instructions for it.
ZE_EXPORT int ze_aio_crc32_is_fast() { return crc32_is_fast() ? 1 : 0; }

ZE_EXPORT uint32_t ze_aio_crc32(uint32_t sum, int64_t address, int64_t bytes) {
    return crc32(sum, reinterpret_cast<const void*>(address), static_cast<size_t>(bytes));
}

ZE_EXPORT void ze_aio_copy(int64_t to, int64_t from, int64_t bytes) {
    copy_past_caches(reinterpret_cast<char*>(to), reinterpret_cast<const char*>(from), static_cast<size_t>(bytes));
}
