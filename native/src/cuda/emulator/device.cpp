// The emulated device: host memory, and kernels that run when they are launched.
#include "device.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "emulator/controls.h"

extern "C" tinyloop_emulator_controls* tinyloop_emulator(void);

namespace tinyloop::gpu {
namespace {

using Graph = std::vector<std::function<void()>>;

}  // namespace

int Device::count(std::string&) { return 1; }
DeviceInfo Device::info(int) { return {"kernels emulated on the CPU", 0}; }
int64_t Device::free_bytes() const { return -1; }

Device::Device(int ordinal) : ordinal_(ordinal), level_("emulated") {
    if (ordinal != 0) throw Unavailable("no device " + std::to_string(ordinal) + ": the emulator is device 0");
}
Device::~Device() { delete static_cast<Graph*>(recording_); }
void Device::use() const {}

void* Device::allocate(size_t bytes, Use use) {
    tinyloop_emulator_controls& controls = *tinyloop_emulator();
    if (!bytes) return nullptr;
    if (bytes > controls.memory_limit - std::min(controls.memory_held, controls.memory_limit)) throw std::bad_alloc();
    void* memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (!memory) throw std::bad_alloc();
    std::memset(memory, 0xFF, bytes);  // NaN: a device's memory holds anything
    controls.memory_held += bytes;
    held_[use == Use::lane] += bytes;
    return memory;
}
void Device::release(void* memory, size_t bytes, Use use) noexcept {
    std::free(memory);
    tinyloop_emulator()->memory_held -= bytes;
    held_[use == Use::lane] -= bytes;
}

void Device::upload(void* to, const void* from, size_t bytes) {
    if (bytes) std::memcpy(to, from, bytes);
}
void Device::download(void* to, const void* from, size_t bytes) {
    std::memcpy(to, from, bytes);
    tinyloop_emulator()->bytes_to_host += bytes;
}
void Device::clear(void* memory, size_t bytes) {
    if (bytes) std::memset(memory, 0, bytes);
}
void Device::copy(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t rows) {
    for (size_t i = 0; i < rows; ++i)
        std::memcpy(static_cast<char*>(to) + i * to_pitch, static_cast<const char*>(from) + i * from_pitch, width);
}
void Device::wait() {}

void Device::begin_graph() { recording_ = new Graph; }
void* Device::end_graph() {
    void* graph = recording_;
    recording_ = nullptr;
    return graph;
}
void Device::abandon_graph() noexcept { delete static_cast<Graph*>(std::exchange(recording_, nullptr)); }
void Device::run_graph(void* graph) {
    ++tinyloop_emulator()->graph_runs;
    for (const std::function<void()>& kernel : *static_cast<Graph*>(graph)) kernel();
}
void Device::release_graph(void* graph) noexcept { delete static_cast<Graph*>(graph); }

void Device::check(int, const char*) {}
void Device::submit(const std::function<void()>& kernel) {
    if (recording_)
        static_cast<Graph*>(recording_)->push_back(kernel);
    else
        kernel();
}

}  // namespace tinyloop::gpu
