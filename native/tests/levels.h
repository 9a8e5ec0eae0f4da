// The SIMD levels that a test holds against the portable one: the test's arguments name them, and each must be there;
// without arguments all that this machine runs, the portable one first.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cpu/kernels.h"

inline std::vector<const tinyloop::cpu::Kernels*> g_levels;

inline const std::vector<const tinyloop::cpu::Kernels*>& levels() { return g_levels; }

inline void choose_levels(int argc, char** argv) {
    using namespace tinyloop::cpu;
    const std::vector<const Kernels*> all = {portable_kernels(), avx2_kernels(), avx512_kernels()};
    for (const Kernels* k : all)
        if (k && argc == 1) g_levels.push_back(k);
    for (int i = 1; i < argc; ++i) {
        const size_t before = g_levels.size();
        for (const Kernels* k : all)
            if (k && std::strcmp(k->name, argv[i]) == 0) g_levels.push_back(k);
        if (g_levels.size() == before) {
            std::printf("level '%s' is not one that runs here: portable, avx2 or avx512\n", argv[i]);
            std::exit(2);
        }
    }
    for (const Kernels* k : g_levels) std::printf("level %s\n", k->name);
}
