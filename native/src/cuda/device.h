// The few things that the backend asks of a device: memory with an exact account, copies, one stream, graphs.
// Two bodies: device.cu on the CUDA runtime, emulator/device.cpp on host memory. Knows no model.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>

namespace tinyloop::gpu {

// There is no such device, or no driver.
struct Unavailable : std::runtime_error {
    using std::runtime_error::runtime_error;
};

enum class Use { model, lane };  // whose account memory is on: weights and work space, or caches and saved states

struct DeviceInfo {
    std::string name;
    uint64_t total_bytes;  // of its own memory; 0: it computes in the host's
};

class Device {
  public:
    static int count(std::string& reason);  // of devices that can be used; of 0 the reason
    static DeviceInfo info(int ordinal);

    explicit Device(int ordinal);  // throws Unavailable
    ~Device();
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    const std::string& level() const { return level_; }  // "sm_90"
    // Makes it the calling thread's device: every entry of the backend begins so.
    void use() const;

    void* allocate(size_t bytes, Use use);  // throws std::bad_alloc; 0 bytes are nullptr
    void release(void* memory, size_t bytes, Use use) noexcept;
    uint64_t held(Use use) const { return held_[use == Use::lane]; }  // bytes allocated and not released
    int64_t free_bytes() const;  // that the device has left; -1: it computes in the host's memory

    // In the order of the stream. A download returns when the bytes are there.
    void upload(void* to, const void* from, size_t bytes);
    void download(void* to, const void* from, size_t bytes);
    void clear(void* memory, size_t bytes);
    // `rows` runs of `width` bytes.
    void copy(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t rows);
    void wait();  // until the stream is empty; throws what a kernel failed with

    // Kernels launched between begin and end (or abandon) are recorded, not run.
    void begin_graph();
    void* end_graph();
    void abandon_graph() noexcept;
    void run_graph(void* graph);
    void release_graph(void* graph) noexcept;

    void* stream() const { return stream_; }
    void check(int error, const char* doing);          // a CUDA error code
    void submit(const std::function<void()>& kernel);  // of the emulator: runs or records it

  private:
    int ordinal_;
    std::string level_;
    uint64_t held_[2] = {0, 0};
    void* stream_ = nullptr;
    void* recording_ = nullptr;
};

// Device memory that is given back with its owner.
class Memory {
  public:
    Memory() = default;
    Memory(Device& device, size_t bytes, Use use = Use::model)
        : device_(&device), data_(device.allocate(bytes, use)), bytes_(bytes), use_(use) {}
    Memory(Memory&& other) noexcept { swap(other); }
    Memory& operator=(Memory&& other) noexcept {
        swap(other);
        return *this;
    }
    ~Memory() {
        if (device_) device_->release(data_, bytes_, use_);
    }

    template <class T>
    T* as() const {
        return static_cast<T*>(data_);
    }
    size_t bytes() const { return bytes_; }

  private:
    void swap(Memory& other) noexcept {
        std::swap(device_, other.device_);
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        std::swap(use_, other.use_);
    }
    Device* device_ = nullptr;
    void* data_ = nullptr;
    size_t bytes_ = 0;
    Use use_ = Use::model;
};

}  // namespace tinyloop::gpu
