#include "emulator/races.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <set>
#include <unordered_map>
#include <vector>

#include "emulator/emulator.h"
#include "emulator/fibers.h"

namespace tinyloop::gpu::emulator::races {
namespace {

// When a thread touched a byte: its block, the block's barriers so far, and the warp's by a vector clock.
struct Stamp {
    uint32_t block = UINT32_MAX, thread = 0, warp_clock = 0;
    uint64_t barriers = 0;
};
struct Byte {
    Stamp write, read, other_read;  // two reads: enough to keep one of each of two unordered threads
};

bool watching = false;
uint32_t block_number = 0;
uint64_t barriers = 0;
const char* shared = nullptr;
size_t shared_size = 0;
std::unordered_map<uintptr_t, std::array<Byte, 8>> bytes;
std::vector<std::array<uint32_t, 32>> clocks;  // per thread: what it knows of its warp's threads
std::unordered_map<const void*, std::vector<uint32_t>> arrivals;
std::set<uint32_t> joined;  // blocks that this one has waited for, as the last to arrive
std::string first_race;

bool ordered(const Stamp& before, const Stamp& now) {
    if (before.block == UINT32_MAX) return true;
    if (before.block != now.block) return joined.count(before.block) != 0;
    if (before.thread == now.thread || before.barriers != now.barriers) return true;
    return before.thread / 32 == now.thread / 32 && before.warp_clock <= clocks[now.thread][before.thread % 32];
}

void report(const char* kind, uintptr_t address, const Stamp& one, const Stamp& two) {
    if (!first_race.empty()) return;
    const uintptr_t base = reinterpret_cast<uintptr_t>(shared);
    const bool is_shared = address >= base && address < base + shared_size;
    first_race = std::string("race (") + kind + ") in " +
                 (is_shared ? "shared memory at byte " + std::to_string(address - base) : "global memory") +
                 " between thread " + std::to_string(one.thread) + " of one block and thread " +
                 std::to_string(two.thread) + (one.block == two.block ? " of the same" : " of another");
}

}  // namespace

void touch(const void* address, size_t count, bool writes) {
    if (!watching || fibers.holds(address)) return;
    const char* at = static_cast<const char*>(address);
    if (at >= reinterpret_cast<const char*>(&current) && at < reinterpret_cast<const char*>(&current + 1)) return;
    const uint32_t thread = current.thread.x;
    const Stamp now{block_number, thread, clocks[thread][thread % 32], barriers};
    for (size_t i = 0; i < count; ++i) {
        const uintptr_t a = reinterpret_cast<uintptr_t>(address) + i;
        Byte& byte = bytes[a >> 3][a & 7];
        if (!ordered(byte.write, now)) report(writes ? "write, write" : "write, read", a, byte.write, now);
        if (writes) {
            if (!ordered(byte.read, now)) report("read, write", a, byte.read, now);
            if (!ordered(byte.other_read, now)) report("read, write", a, byte.other_read, now);
            byte = {now, {}, {}};
        } else if (ordered(byte.read, now)) {
            byte.read = now;
        } else if (ordered(byte.other_read, now)) {
            byte.other_read = now;
        }
    }
}

void launch_begins() {
    bytes.clear();
    arrivals.clear();
    first_race.clear();
    block_number = 0;
    watching = true;
}
void launch_ends() { watching = false; }

void block_begins(unsigned threads, const char* shared_, size_t shared_bytes) {
    ++block_number;
    ++barriers;
    shared = shared_;
    shared_size = shared_bytes;
    joined.clear();
    const uintptr_t base = reinterpret_cast<uintptr_t>(shared);  // every block has its own
    for (uintptr_t a = base >> 3; a <= (base + shared_bytes) >> 3; ++a) bytes.erase(a);
    clocks.assign(threads, {});
    for (unsigned i = 0; i < threads; ++i) clocks[i][i % 32] = 1;
}
void block_met() { ++barriers; }

void warp_met(unsigned first_thread) {
    std::array<uint32_t, 32> all{};
    for (unsigned i = 0; i < 32; ++i)
        for (unsigned k = 0; k < 32; ++k) all[k] = std::max(all[k], clocks[first_thread + i][k]);
    for (unsigned i = 0; i < 32; ++i) {
        clocks[first_thread + i] = all;
        ++clocks[first_thread + i][i];
    }
}

void arrived(const void* counter, bool last) {
    arrivals[counter].push_back(block_number);
    if (last) joined.insert(arrivals[counter].begin(), arrivals[counter].end());
}

std::string found() { return first_race; }

}  // namespace tinyloop::gpu::emulator::races

// What -fsanitize=thread makes of an access.
using tinyloop::gpu::emulator::races::touch;
#define TL_ACCESS(bytes)                                                               \
    void __tsan_read##bytes(void* address) { touch(address, bytes, false); }           \
    void __tsan_write##bytes(void* address) { touch(address, bytes, true); }           \
    void __tsan_unaligned_read##bytes(void* address) { touch(address, bytes, false); } \
    void __tsan_unaligned_write##bytes(void* address) { touch(address, bytes, true); }
extern "C" {
TL_ACCESS(1)
TL_ACCESS(2)
TL_ACCESS(4)
TL_ACCESS(8)
TL_ACCESS(16)
void __tsan_read_range(void* address, size_t count) { touch(address, count, false); }
void __tsan_write_range(void* address, size_t count) { touch(address, count, true); }
void* __tsan_memcpy(void* to, const void* from, size_t count) {
    touch(from, count, false);
    touch(to, count, true);
    return __builtin_memcpy(to, from, count);
}
// Of the host's code beside the kernels: atomics stay what they are.
uint64_t __tsan_atomic64_load(const volatile uint64_t* at, int) { return __atomic_load_n(at, __ATOMIC_SEQ_CST); }
uint64_t __tsan_atomic64_exchange(volatile uint64_t* at, uint64_t value, int) {
    return __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST);
}
uint64_t __tsan_atomic64_fetch_add(volatile uint64_t* at, uint64_t value, int) {
    return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);
}
uint32_t __tsan_atomic32_fetch_add(volatile uint32_t* at, uint32_t value, int) {
    return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
}
