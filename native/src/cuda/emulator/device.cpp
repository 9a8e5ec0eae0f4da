// The emulated devices: host memory, and kernels that run when they are launched. There is one, in the host's memory,
// unless the environment says otherwise: EMULATED_GPUS=N, EMULATED_GPU_MIB=N of memory for each in every process.
#include "device.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <new>
#include <optional>
#include <vector>

#include "emulator/controls.h"

extern "C" tinyloop_emulator_controls* tinyloop_emulator(void);

namespace tinyloop::gpu {
namespace {

using Graph = std::vector<std::function<void()>>;

constexpr int kMostDevices = 16;
uint64_t taken[kMostDevices];  // bytes of each device

// The value of a variable of the environment, 0 where it is no number.
std::optional<uint64_t> number(const char* variable) {
    const char* text = std::getenv(variable);
    if (!text) return {};
    uint64_t value = 0;
    const char* end = text + std::strlen(text);
    const auto [stop, error] = std::from_chars(text, end, value);
    return error == std::errc() && stop == end && value < uint64_t{1} << 40 ? value : 0;
}

uint64_t own_memory() { return number("EMULATED_GPU_MIB").value_or(0) << 20; }

}  // namespace

int Device::count(std::string& reason) {
    const std::optional<uint64_t> asked = number("EMULATED_GPUS");
    const bool good = asked.value_or(1) >= 1 && asked.value_or(1) <= kMostDevices && number("EMULATED_GPU_MIB") != 0u;
    if (!good) reason = "EMULATED_GPUS and EMULATED_GPU_MIB: expected 1 to 16 devices, of 1 MiB or more";
    return good ? static_cast<int>(asked.value_or(1)) : 0;
}
DeviceInfo Device::info(int) { return {"kernels emulated on the CPU", own_memory()}; }
int64_t Device::free_bytes() const {
    const uint64_t own = own_memory();
    return own ? static_cast<int64_t>(own - std::min(own, taken[ordinal_])) : -1;
}

Device::Device(int ordinal) : ordinal_(ordinal), level_("emulated") {
    std::string reason;
    if (ordinal >= count(reason)) throw Unavailable("no device " + std::to_string(ordinal));
}
Device::~Device() { delete static_cast<Graph*>(recording_); }
void Device::use() const {}

void* Device::allocate(size_t bytes, Use use) {
    tinyloop_emulator_controls& controls = *tinyloop_emulator();
    if (!bytes) return nullptr;
    if (bytes > controls.memory_limit - std::min(controls.memory_held, controls.memory_limit)) throw std::bad_alloc();
    if (const int64_t free = free_bytes(); free >= 0 && bytes > static_cast<uint64_t>(free)) throw std::bad_alloc();
    void* memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (!memory) throw std::bad_alloc();
    std::memset(memory, 0xFF, bytes);  // NaN: a device's memory holds anything
    controls.memory_held += bytes;
    taken[ordinal_] += bytes;
    held_[use == Use::lane] += bytes;
    return memory;
}
void Device::release(void* memory, size_t bytes, Use use) noexcept {
    std::free(memory);
    tinyloop_emulator()->memory_held -= bytes;
    taken[ordinal_] -= bytes;
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
