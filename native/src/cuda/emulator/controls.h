// What tests set and read of the emulator, through the plug-in's entry `tinyloop_emulator`.
#pragma once
#include <stdint.h>

enum tinyloop_order { TL_ORDER_FORWARD = 0, TL_ORDER_REVERSE = 1, TL_ORDER_SHUFFLED = 2 };

struct tinyloop_emulator_controls {
    int order;              // in which fibers and blocks run, tinyloop_order
    uint64_t seed;          // of a shuffled order
    uint64_t memory_limit;  // bytes that the device has
    uint64_t memory_held;   // bytes allocated and not released
    uint64_t launches;      // kernels started so far, one by one or by a graph
    uint64_t graph_runs;
    uint64_t bytes_to_host;
};

typedef struct tinyloop_emulator_controls* (*tinyloop_emulator_entry)(void);
