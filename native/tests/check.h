// The smallest test harness: CHECK counts and prints failures, main() ends with finish().
#pragma once
#include <cstdio>
#include <string>

inline int g_checks = 0, g_failures = 0;

#define CHECK(condition)                                                        \
    do {                                                                        \
        ++g_checks;                                                             \
        if (!(condition)) {                                                     \
            ++g_failures;                                                       \
            std::printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
        }                                                                       \
    } while (0)

inline int finish() {
    std::printf("%d checks, %d failed\n", g_checks, g_failures);
    return g_failures || !g_checks;
}
