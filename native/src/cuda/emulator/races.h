// The race detector: two accesses to a byte, one of them a write, by threads that no barrier stands between.
//
// It is exact for the barriers that CUDA has. The kernels are compiled with -fsanitize=thread, which calls
// __tsan_read4(address) and the like at each access; those functions are ours (races.cpp), not the sanitizer's library.
// Without TINYLOOP_EMULATOR_RACES everything here is empty.
#pragma once
#include <cstddef>
#include <string>

namespace tinyloop::gpu::emulator::races {

#if defined(TINYLOOP_EMULATOR_RACES)
void launch_begins();
void launch_ends();
void block_begins(unsigned threads, const char* shared, size_t shared_bytes);
void block_met();                      // all of the block's threads are at a barrier
void warp_met(unsigned first_thread);  // the 32 threads from there on are
void arrived(const void* counter, bool last);
std::string found();  // the first race of the launch, "" if there was none
#else
inline void launch_begins() {}
inline void launch_ends() {}
inline void block_begins(unsigned, const char*, size_t) {}
inline void block_met() {}
inline void warp_met(unsigned) {}
inline void arrived(const void*, bool) {}
inline std::string found() { return {}; }
#endif

}  // namespace tinyloop::gpu::emulator::races
