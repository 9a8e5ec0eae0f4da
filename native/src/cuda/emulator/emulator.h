// Runs CUDA kernels on the CPU, to prove what can be proved of them without a GPU. Every CUDA thread is a fiber on one
// thread of the host; a block's fibers run until each waits at a barrier, in an order that can be shuffled.
//
// What it detects: a barrier or shuffle that only part of the threads reach, threads that meet at different ones, a
// write past the end of shared memory; shared memory starts as NaN, so what is read before it is written shows in the
// results; operands of the tensor cores that are not of their type. With the kernels compiled for it (races.h), data
// races in shared and global memory. Under ASan, every access outside an allocation. What it cannot show: the device's
// own rounding, its memory model, its speed.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

namespace tinyloop::gpu::emulator {

struct Index {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

struct Current {  // what the running fiber sees
    Index thread, block;
    char* shared;
};
extern Current current;

// Runs the kernel for every thread of the grid; throws std::runtime_error on what it detects.
void run(dim3 grid, unsigned threads, size_t shared_bytes, const std::function<void()>& kernel);

void block_barrier(const char* file, int line);
void warp_barrier(const char* file, int line);
uint32_t shuffle_xor(unsigned mask, uint32_t value, int lanes);
bool arrive(int* counter, int blocks);  // gpu.h, last_to_arrive
float to_tf32(float value);
void multiply_add(float (&sums)[4], const float (&a)[4], float b0, float b1);  // gpu.h
void fail(const char* what);                                                   // ends the launch with this error

}  // namespace tinyloop::gpu::emulator
