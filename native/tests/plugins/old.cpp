// A plug-in of an earlier version of the interface: only the head of its table may be looked at.
#include <cstdint>

namespace {
constexpr struct {
    uint32_t abi, size;
    const char* name;
} kTable = {1, 16, "old"};
}  // namespace

extern "C" __attribute__((visibility("default"))) const void* tinyloop_backend(void) { return &kTable; }
