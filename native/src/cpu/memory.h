// Zeroed, 64-byte aligned memory with an exact size, for weights, caches and work space.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <new>
#include <utility>

namespace tinyloop::cpu {

class Buffer {
  public:
    static constexpr size_t kHuge = 4u << 20;

    Buffer() = default;
    // Throws std::bad_alloc. Pages are zero and are taken from the system when first touched.
    explicit Buffer(size_t bytes) : bytes_(bytes) {
        if (bytes == 0) return;
        data_ = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (data_ == MAP_FAILED) {
            data_ = nullptr;
            throw std::bad_alloc();
        }
        if (bytes >= kHuge) ::madvise(data_, bytes, MADV_HUGEPAGE);  // fewer page faults and TLB misses; a hint
    }
    Buffer(Buffer&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    Buffer& operator=(Buffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~Buffer() {
        if (data_) ::munmap(data_, bytes_);
    }

    size_t bytes() const { return bytes_; }
    template <class T>
    T* as() const {
        return static_cast<T*>(data_);
    }

  private:
    void* data_ = nullptr;
    size_t bytes_ = 0;
};

}  // namespace tinyloop::cpu
