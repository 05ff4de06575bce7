// Optimizer steps and conversions on a GPU: many tensors in one launch, on the stream that is given, 16 bytes an
// access.
//
// The arithmetic is that of the CPU (ze/rules.h), compiled without contraction, so a GPU gives the bits of the twin.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "ze/export.h"
#include "ze/rules.h"
#include "ze/segments.h"

namespace {

using namespace ze;

constexpr int kThreads = 256;
constexpr int kLane = 8;                            // elements of a thread at a time: 16 bytes of a 16-bit type
constexpr int64_t kChunk = int64_t(kThreads) * 16;  // elements of a block
constexpr int kRows = 32;  // tensors of a launch; the batch is a kernel argument of at most 4 KiB

template <class Row>
struct Batch {
    Row rows[kRows];
    Hypers hypers[kRows];
    int64_t first[kRows + 1];  // chunks before each row
    int count;
};
static_assert(sizeof(Batch<Update>) <= 4096, "a kernel argument");

__device__ __forceinline__ float convert_up(__half x) { return __half2float(x); }
__device__ __forceinline__ float convert_up(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void convert_down(float x, __half* to) { *to = __float2half_rn(x); }
__device__ __forceinline__ void convert_down(float x, __nv_bfloat16* to) { *to = __float2bfloat16_rn(x); }

template <class T>
__device__ __forceinline__ void load_packed(const void* source, int64_t at, float* x) {
    const uint4 packed = *reinterpret_cast<const uint4*>(static_cast<const T*>(source) + at);
    const T* each = reinterpret_cast<const T*>(&packed);
#pragma unroll
    for (int k = 0; k < kLane; ++k) x[k] = convert_up(each[k]);
}

template <class T>
__device__ __forceinline__ void store_packed(void* target, int64_t at, const float* x) {
    uint4 packed;
    T* each = reinterpret_cast<T*>(&packed);
#pragma unroll
    for (int k = 0; k < kLane; ++k) convert_down(x[k], each + k);
    *reinterpret_cast<uint4*>(static_cast<T*>(target) + at) = packed;
}

// kLane elements from `at`, which lies on 16 bytes.
__device__ __forceinline__ void load_lane(const void* source, int kind, int64_t at, float* x) {
    if (kind == kFloat) {
        const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(source) + at);
        *reinterpret_cast<float4*>(x) = from[0];
        *reinterpret_cast<float4*>(x + 4) = from[1];
    } else if (kind == kBfloat16) {
        load_packed<__nv_bfloat16>(source, at, x);
    } else {
        load_packed<__half>(source, at, x);
    }
}

__device__ __forceinline__ void store_lane(void* target, int kind, int64_t at, const float* x) {
    if (kind == kFloat) {
        float4* to = reinterpret_cast<float4*>(static_cast<float*>(target) + at);
        to[0] = *reinterpret_cast<const float4*>(x);
        to[1] = *reinterpret_cast<const float4*>(x + 4);
    } else if (kind == kBfloat16) {
        store_packed<__nv_bfloat16>(target, at, x);
    } else {
        store_packed<__half>(target, at, x);
    }
}

__device__ __forceinline__ float load_one(const void* source, int kind, int64_t at) {
    if (kind == kFloat) return static_cast<const float*>(source)[at];
    if (kind == kBfloat16) return convert_up(static_cast<const __nv_bfloat16*>(source)[at]);
    return convert_up(static_cast<const __half*>(source)[at]);
}

__device__ __forceinline__ void store_one(void* target, int kind, int64_t at, float x) {
    if (kind == kFloat) {
        static_cast<float*>(target)[at] = x;
    } else if (kind == kBfloat16) {
        convert_down(x, static_cast<__nv_bfloat16*>(target) + at);
    } else {
        convert_down(x, static_cast<__half*>(target) + at);
    }
}

__device__ __forceinline__ bool on_16_bytes(const void* address) {
    return (reinterpret_cast<uintptr_t>(address) & 15) == 0;
}

__device__ __forceinline__ bool aligned(const Update& row) {
    bool all = on_16_bytes(row.param) && on_16_bytes(row.grad) && on_16_bytes(row.copy);
    for (int s = 0; s < 3; ++s) all = all && on_16_bytes(row.states[s]);
    return all;
}

template <class Row>
__device__ __forceinline__ int row_of(const Batch<Row>& batch, int64_t chunk) {
    int i = 0;
    while (i + 1 < batch.count && batch.first[i + 1] <= chunk) ++i;
    return i;
}

template <class Rule>
__device__ __forceinline__ void update_one(const Update& row, const Hypers& h, float scale, int64_t at) {
    float p = load_one(row.param, row.param_kind(), at);
    const float g = load_one(row.grad, row.grad_kind(), at) * scale;
    float state[3] = {0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int s = 0; s < Rule::kStates; ++s) state[s] = row.states[s][at];
    Rule::apply(p, g, state[0], state[1], state[2], h);
#pragma unroll
    for (int s = 0; s < Rule::kStates; ++s) row.states[s][at] = state[s];
    store_one(row.param, row.param_kind(), at, p);
    if (row.copy_kind() != kNone) store_one(row.copy, row.copy_kind(), at, p);
}

template <class Rule>
__device__ __forceinline__ void update_lane(const Update& row, const Hypers& h, float scale, int64_t at) {
    alignas(16) float p[kLane], g[kLane], state[3][kLane];
    load_lane(row.param, row.param_kind(), at, p);
    load_lane(row.grad, row.grad_kind(), at, g);
#pragma unroll
    for (int s = 0; s < Rule::kStates; ++s) load_lane(row.states[s], kFloat, at, state[s]);
#pragma unroll
    for (int k = 0; k < kLane; ++k) Rule::apply(p[k], g[k] * scale, state[0][k], state[1][k], state[2][k], h);
#pragma unroll
    for (int s = 0; s < Rule::kStates; ++s) store_lane(row.states[s], kFloat, at, state[s]);
    store_lane(row.param, row.param_kind(), at, p);
    if (row.copy_kind() != kNone) store_lane(row.copy, row.copy_kind(), at, p);
}

template <class Rule>
__global__ void __launch_bounds__(kThreads)
    update_kernel(const __grid_constant__ Batch<Update> batch, float factor, const float* factor_at) {
    const int64_t chunk = blockIdx.x;
    const int i = row_of(batch, chunk);
    const Update& row = batch.rows[i];
    const Hypers h = batch.hypers[i];
    const float scale = factor_at == nullptr ? factor : *factor_at;
    const int64_t begin = (chunk - batch.first[i]) * kChunk;
    const int64_t end = begin + kChunk < row.count ? begin + kChunk : row.count;
    const int64_t body = aligned(row) ? begin + (end - begin) / kLane * kLane : begin;
    for (int64_t at = begin + int64_t(threadIdx.x) * kLane; at < body; at += int64_t(kThreads) * kLane) {
        update_lane<Rule>(row, h, scale, at);
    }
    for (int64_t at = body + threadIdx.x; at < end; at += kThreads) update_one<Rule>(row, h, scale, at);
}

__global__ void __launch_bounds__(kThreads)
    cast_kernel(const __grid_constant__ Batch<Cast> batch, float factor, const float* factor_at) {
    const int64_t chunk = blockIdx.x;
    const int i = row_of(batch, chunk);
    const Cast& row = batch.rows[i];
    const float scale = factor_at == nullptr ? factor : *factor_at;
    const int64_t begin = (chunk - batch.first[i]) * kChunk;
    const int64_t end = begin + kChunk < row.count ? begin + kChunk : row.count;
    const bool wide = on_16_bytes(row.target) && on_16_bytes(row.source);
    const int64_t body = wide ? begin + (end - begin) / kLane * kLane : begin;
    for (int64_t at = begin + int64_t(threadIdx.x) * kLane; at < body; at += int64_t(kThreads) * kLane) {
        alignas(16) float x[kLane];
        load_lane(row.source, row.source_kind(), at, x);
#pragma unroll
        for (int k = 0; k < kLane; ++k) x[k] *= scale;
        store_lane(row.target, row.target_kind(), at, x);
    }
    for (int64_t at = body + threadIdx.x; at < end; at += kThreads) {
        store_one(row.target, row.target_kind(), at, load_one(row.source, row.source_kind(), at) * scale);
    }
}

// Calls launch(batch, blocks) for batches of at most kRows rows; the first error ends it.
template <class Row, class Fill, class Launch>
cudaError_t for_batches(const Row* rows, int64_t count, Fill&& fill, Launch&& launch) {
    for (int64_t from = 0; from < count; from += kRows) {
        Batch<Row> batch;
        batch.count = int(count - from < kRows ? count - from : kRows);
        batch.first[0] = 0;
        for (int i = 0; i < batch.count; ++i) {
            batch.rows[i] = rows[from + i];
            fill(batch, i);
            batch.first[i + 1] = batch.first[i] + (rows[from + i].count + kChunk - 1) / kChunk;
        }
        const int64_t blocks = batch.first[batch.count];
        if (blocks == 0) continue;
        launch(batch, unsigned(blocks));
        const cudaError_t error = cudaGetLastError();
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

// Makes `device` the current one of the thread for as long as this lives.
class OnDevice {
  public:
    explicit OnDevice(int device) {
        error = cudaGetDevice(&before_);
        changed_ = error == cudaSuccess && before_ != device;
        if (changed_) error = cudaSetDevice(device);
    }
    ~OnDevice() {
        if (changed_) cudaSetDevice(before_);
    }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

    cudaError_t error;

  private:
    int before_ = 0;
    bool changed_ = false;
};

}  // namespace

// As ze_update, asynchronous on `stream` of `device`. Where `scale_at` is given, the factor is read there, on the
// device. 0, or an error of CUDA, or -1 for a rule that is not known.
ZE_EXPORT int ze_update_cuda(int rule, const Update* rows, int64_t count, const Hypers* hypers, float scale,
                             const float* scale_at, int device, void* stream) {
    const OnDevice current(device);
    cudaError_t error = current.error;
    if (error != cudaSuccess) return int(error);
    const bool known = with_rule(rule, [&](auto kind) {
        using Rule = decltype(kind);
        error = for_batches(
            rows, count, [&](Batch<Update>& batch, int i) { batch.hypers[i] = hypers[batch.rows[i].hypers()]; },
            [&](const Batch<Update>& batch, unsigned blocks) {
                update_kernel<Rule><<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(batch, scale, scale_at);
            });
    });
    return known ? int(error) : -1;
}

// As ze_cast, asynchronous on `stream` of `device`.
ZE_EXPORT int ze_cast_cuda(const Cast* rows, int64_t count, float scale, const float* scale_at, int device,
                           void* stream) {
    const OnDevice current(device);
    if (current.error != cudaSuccess) return int(current.error);
    return int(for_batches(
        rows, count, [](Batch<Cast>&, int) {},
        [&](const Batch<Cast>& batch, unsigned blocks) {
            cast_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(batch, scale, scale_at);
        }));
}

ZE_EXPORT const char* ze_cuda_error(int error) {
    return error < 0 ? "no such rule" : cudaGetErrorString(static_cast<cudaError_t>(error));
}
