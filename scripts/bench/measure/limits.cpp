// Measures what the machine can do at most: multiply-adds, conversions and reads from each level of memory, on one
// thread and on all. Prints one JSON object. Usage: limits THREADS L2_BYTES SHARED_BYTES DRAM_BYTES, where the sizes
// are working sets: of one thread in its L2, of all threads in the last-level cache, of all threads in DRAM.
//
// Compiled for the machine it runs on (machine.py does it), so it may use any width the compiler offers.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <thread>
#include <vector>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
typedef float Floats __attribute__((vector_size(kBytes)));
typedef uint64_t Words __attribute__((vector_size(kBytes)));
constexpr int kFloats = kBytes / 4;

using Clock = std::chrono::steady_clock;
std::atomic<uint64_t> sink;  // what is written here must have been computed

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// One thread's work: does a small piece, returns how much it was.
using Piece = std::function<double()>;

// Units per second of all threads together: the best of a few short runs, as what is wanted is a ceiling.
double rate(int threads, const std::function<Piece(int thread)>& make) {
    constexpr int kRuns = 7;
    constexpr double kRunSeconds = 0.06;
    double best = 0;
    for (int run = 0; run < kRuns; ++run) {
        std::vector<double> per_second(threads);
        std::atomic<int> ready = 0;
        std::vector<std::thread> team;
        for (int t = 0; t < threads; ++t)
            team.emplace_back([&, t] {
                const Piece piece = make(t);
                piece();
                for (++ready; ready < threads;) {}
                const Clock::time_point start = Clock::now();
                double done = 0, elapsed = 0;
                while (elapsed < kRunSeconds) {
                    done += piece();
                    elapsed = seconds_since(start);
                }
                per_second[t] = done / elapsed;
            });
        for (std::thread& thread : team) thread.join();
        double sum = 0;
        for (const double each : per_second) sum += each;
        best = std::max(best, sum);
    }
    return best;
}

// Additions that wait for each other: one per cycle.
double clock_piece() {
    constexpr int kAdds = 1 << 20;
    uint64_t x = sink;
    for (int i = 0; i < kAdds; i += 16) {
#pragma GCC unroll 16
        for (int j = 0; j < 16; ++j) {
            x += 1;
            asm volatile("" : "+r"(x));
        }
    }
    sink = x;
    return kAdds;
}

// Multiply-adds between registers; each counts as two operations.
double fma_piece() {
    constexpr int kSteps = 1 << 14, kSums = 12;
    Floats sums[kSums] = {}, factor = {}, term = {};
    factor += 0.999f;
    term += 1e-7f;
    for (int j = 0; j < kSums; ++j) sums[j] += static_cast<float>(j);  // alike, the compiler would keep only one
    for (int i = 0; i < kSteps; ++i) {
#pragma GCC unroll 12
        for (int j = 0; j < kSums; ++j) sums[j] = sums[j] * factor + term;
    }
    float total = 0;
    for (const Floats& sum : sums)
        for (int lane = 0; lane < kFloats; ++lane) total += sum[lane];
    sink = static_cast<uint64_t>(total);
    return 2.0 * kSteps * kSums * kFloats;
}

double read_piece(const char* data, size_t bytes) {
    Words sums[4] = {};
    for (size_t at = 0; at < bytes; at += 8 * kBytes) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) sums[j % 4] ^= *reinterpret_cast<const Words*>(data + at + j * kBytes);
    }
    asm volatile("" ::: "memory");  // the next pass reads again
    sink = (sums[0] ^ sums[1] ^ sums[2] ^ sums[3])[0];
    return static_cast<double>(bytes);
}

#if defined(__AVX2__)
// What an int8 product does: multiply unsigned by signed bytes, widen twice, add. Two operations per product.
double int8_piece() {
    constexpr int kSteps = 1 << 14, kSums = 6;
    __m256i sums[kSums] = {}, x = _mm256_set1_epi8(3), w = _mm256_set1_epi8(5), ones = _mm256_set1_epi16(1);
    for (int i = 0; i < kSteps; ++i) {
#pragma GCC unroll 6
        for (int j = 0; j < kSums; ++j) {
            asm volatile("" : "+x"(w));
            sums[j] = _mm256_add_epi32(sums[j], _mm256_madd_epi16(_mm256_maddubs_epi16(x, w), ones));
        }
    }
    uint64_t total = 0;
    for (const __m256i& sum : sums) total += static_cast<uint32_t>(_mm256_extract_epi32(sum, 0));
    sink = total;
    return 2.0 * kSteps * kSums * 32;
}
#endif

#if defined(__F16C__)
// Numbers converted from fp16 to fp32, from the first-level cache.
double convert_piece() {
    constexpr int kNumbers = 4096, kPasses = 64;
    alignas(64) static thread_local uint16_t halves[kNumbers];
    __m256 sums[4] = {};
    for (int pass = 0; pass < kPasses; ++pass) {
        for (int i = 0; i < kNumbers; i += 32)
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j)
                sums[j] += _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(halves + i + 8 * j)));
        asm volatile("" ::: "memory");
    }
    sink = static_cast<uint64_t>((sums[0] + sums[1] + sums[2] + sums[3])[0]);
    return 1.0 * kNumbers * kPasses;
}
#endif

void print_rates(const char* name, int threads, double unit, const std::function<Piece(int)>& make) {
    std::printf(", \"%s\": {\"1\": %.1f", name, rate(1, make) / unit);
    if (threads > 1) std::printf(", \"%d\": %.1f", threads, rate(threads, make) / unit);
    std::printf("}");
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 5) {
        std::fprintf(stderr, "usage: limits THREADS L2_BYTES SHARED_BYTES DRAM_BYTES\n");
        return 2;
    }
    const int threads = std::atoi(argv[1]);
    rate(threads, [](int) { return fma_piece; });  // a cold core is slow
    const double hertz = rate(1, [](int) { return clock_piece; });
    const double fma = rate(1, [](int) { return fma_piece; });
    std::printf("{\"clock_ghz\": %.2f, \"flop_per_cycle\": %.1f", hertz / 1e9, fma / hertz);
    print_rates("fma_gflops", threads, 1e9, [](int) { return fma_piece; });
#if defined(__AVX2__)
    print_rates("int8_gops", threads, 1e9, [](int) { return int8_piece; });
#endif
#if defined(__F16C__)
    print_rates("fp16_to_fp32_gelements", threads, 1e9, [](int) { return convert_piece; });
#endif
    const size_t l2 = std::strtoull(argv[2], nullptr, 10), shared = std::strtoull(argv[3], nullptr, 10),
                 dram = std::strtoull(argv[4], nullptr, 10);
    const size_t all = std::max({threads * l2, shared, dram});
    const std::unique_ptr<char, decltype(&std::free)> data(
        static_cast<char*>(std::aligned_alloc(4096, (all + 4095) / 4096 * 4096)), &std::free);
    if (!data) {
        std::fprintf(stderr, "limits: no memory for %zu bytes\n", all);
        return 1;
    }
    std::fill(data.get(), data.get() + all, 1);
    auto reads = [&](const char* name, size_t of_one_thread, size_t of_all) {
        const auto make = [&](int team) {
            const size_t mine = (of_all ? of_all / team : of_one_thread) / (8 * kBytes) * (8 * kBytes);
            return [&data, mine](int t) -> Piece {
                const char* begin = data.get() + t * mine;
                const int passes = static_cast<int>(std::max<size_t>(1, (1 << 20) / mine));
                return [begin, mine, passes] {
                    double done = 0;
                    for (int pass = 0; pass < passes; ++pass) done += read_piece(begin, mine);
                    return done;
                };
            };
        };
        std::printf(", \"%s\": {\"1\": %.1f", name, rate(1, make(1)) / 1e9);
        if (threads > 1) std::printf(", \"%d\": %.1f", threads, rate(threads, make(threads)) / 1e9);
        std::printf("}");
    };
    reads("l2_gb_per_s", l2, 0);
    reads("l3_gb_per_s", 0, shared);
    reads("dram_gb_per_s", 0, dram);
    std::printf("}\n");
}
