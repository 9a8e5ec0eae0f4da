// The device on the CUDA runtime. No part of it ends the process: what fails is thrown, and the next call may go well.
#include "device.h"

#include <cuda_runtime.h>

#include <new>

namespace tinyloop::gpu {
namespace {

cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }

[[noreturn]] void fail(cudaError_t error, const char* doing) {
    (void)cudaGetLastError();  // or the next check would report it again
    if (error == cudaErrorMemoryAllocation) throw std::bad_alloc();
    throw std::runtime_error(std::string(doing) + ": " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) +
                             ")");
}

}  // namespace

void Device::check(int error, const char* doing) {
    if (error != cudaSuccess) fail(static_cast<cudaError_t>(error), doing);
}

int Device::count(std::string& reason) {
    int count = 0;
    if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
        (void)cudaGetLastError();
        reason = cudaGetErrorString(error);
        return 0;
    }
    if (!count) reason = "the driver finds no device";
    return count;
}

DeviceInfo Device::info(int ordinal) {
    cudaDeviceProp properties;
    if (const cudaError_t error = cudaGetDeviceProperties(&properties, ordinal); error != cudaSuccess)
        fail(error, "reading the device's properties");
    return {properties.name, properties.totalGlobalMem};
}

Device::Device(int ordinal) : ordinal_(ordinal) {
    int major = 0, minor = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal), "asking the device's version");
    check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal), "asking the device's version");
    if (major < 8)
        throw Unavailable("the device has compute capability " + std::to_string(major) + "." + std::to_string(minor) +
                          "; 8.0 or newer is needed");
    level_ = "sm_" + std::to_string(major * 10 + minor);
    use();
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "creating a stream");
    stream_ = stream;
}

int64_t Device::free_bytes() const {
    size_t free = 0, total = 0;
    use();
    if (const cudaError_t error = cudaMemGetInfo(&free, &total); error != cudaSuccess) fail(error, "asking for memory");
    return static_cast<int64_t>(free);
}

Device::~Device() {
    if (stream_) (void)cudaStreamDestroy(stream_of(stream_));
}

void Device::use() const {
    if (const cudaError_t error = cudaSetDevice(ordinal_); error != cudaSuccess) fail(error, "choosing the device");
}

void* Device::allocate(size_t bytes, Use use) {
    if (!bytes) return nullptr;
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes), "allocating memory");
    held_[use == Use::lane] += bytes;
    return memory;
}

void Device::release(void* memory, size_t bytes, Use use) noexcept {
    if (cudaFree(memory) != cudaSuccess) (void)cudaGetLastError();
    held_[use == Use::lane] -= bytes;
}

void Device::upload(void* to, const void* from, size_t bytes) {
    if (bytes)
        check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_of(stream_)), "copying to the device");
}

void Device::download(void* to, const void* from, size_t bytes) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_of(stream_)), "copying from the device");
    wait();
}

void Device::clear(void* memory, size_t bytes) {
    if (bytes) check(cudaMemsetAsync(memory, 0, bytes, stream_of(stream_)), "clearing memory");
}

void Device::copy(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t rows) {
    check(cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, rows, cudaMemcpyDeviceToDevice, stream_of(stream_)),
          "copying on the device");
}

void Device::wait() { check(cudaStreamSynchronize(stream_of(stream_)), "waiting for the device"); }

void Device::begin_graph() {
    check(cudaStreamBeginCapture(stream_of(stream_), cudaStreamCaptureModeThreadLocal), "recording a graph");
}

void* Device::end_graph() {
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(stream_of(stream_), &graph), "recording a graph");
    cudaGraphExec_t ready = nullptr;
    const cudaError_t error = cudaGraphInstantiate(&ready, graph, 0);
    (void)cudaGraphDestroy(graph);
    check(error, "preparing a graph");
    return ready;
}

void Device::abandon_graph() noexcept {
    cudaGraph_t graph = nullptr;
    (void)cudaStreamEndCapture(stream_of(stream_), &graph);
    if (graph) (void)cudaGraphDestroy(graph);
    (void)cudaGetLastError();
}

void Device::run_graph(void* graph) {
    check(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), stream_of(stream_)), "running a graph");
}

void Device::release_graph(void* graph) noexcept {
    if (graph) (void)cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph));
}

}  // namespace tinyloop::gpu
