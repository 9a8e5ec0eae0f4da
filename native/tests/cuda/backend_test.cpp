// A device plug-in against the CPU backend: the same rows go to both, and logits agree to rounding, over families,
// cache modes, windows, draft trees, resumed rows and early exits. Within the plug-in bits are compared: what a row
// computes does not depend on the rows beside it, on chunks, on the order of threads, or on graphs.
//
// A row that wants the first tokens in rank gets them, and no more crosses to the host.
//
// backend_test PLUGIN [short]: short leaves out what only repeats, where every access is watched.
#include <dlfcn.h>

#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "check.h"
#include "cuda/emulator/controls.h"
#include "cuda/tiny_backend.h"

using namespace tiny;

namespace {

const char* const kModes[] = {"fp16", "int8", "h_fp16", "h_int8", "h_int4"};
// Rounding in another order can move an element of a cache by one step; int4's are large.
constexpr double kTolerance[] = {1e-3, 1e-2, 1e-3, 1e-2, 0.1};

void compare(const char* what, const Family& family, int mode, const std::vector<float>& one,
             const std::vector<float>& other) {
    const double apart = difference(one, other);
    if (!(apart < kTolerance[mode])) std::printf("%s, %s, %s: apart by %g\n", what, family.name, kModes[mode], apart);
    CHECK(apart < kTolerance[mode]);
}

// ---------------------------------------------------------------- against the CPU

void test_against_cpu(const tl_backend& device, const tl_backend& cpu, const Family& family, int mode) {
    const Tiny tiny(family);
    Model mine(device, tiny.desc, 32), reference(cpu, tiny.desc, 32);
    for (Model* model : {&mine, &reference}) {
        model->add_cache(mode, 64, 4);
        model->add_cache(mode, 64, 4);
        model->add_states(20);
    }
    compare("a prompt", family, mode, mine.run(sequence(0, 0, 19, 3)), reference.run(sequence(0, 0, 19, 3)));
    std::vector<tl_row> rows = sequence(1, 0, 9, 4);  // another lane, and the first goes on: rows at other loops
    for (const tl_row& r : sequence(0, 19, 22, 3)) rows.push_back(r);
    compare("two lanes", family, mode, mine.run(rows), reference.run(rows));

    std::vector<tl_row> tree;  // a root at 22 with two children, one of which has a child
    for (const auto& [bit, position, mask] : {std::tuple{0, 22, 1}, {1, 23, 3}, {2, 23, 5}, {3, 24, 13}}) {
        tl_row r = row(0, position, 3, TL_ROW_LOGITS);
        r.base = 22;
        r.slot = 22 + bit;
        r.tree = static_cast<uint64_t>(mask);
        r.token = bit + 2;
        tree.push_back(r);
    }
    compare("a draft tree", family, mode, mine.run(tree), reference.run(tree));

    rows = sequence(1, 9, 16, 2, 0);  // two loops now, the rest later
    for (size_t i = 0; i < rows.size(); ++i) rows[i].state = static_cast<int>(i);
    mine.run(rows), reference.run(rows);
    for (tl_row& r : rows) r.loop_begin = 2, r.loop_end = 4, r.flags = TL_ROW_LOGITS;
    compare("resumed", family, mode, mine.run(rows), reference.run(rows));
}

// Weights that are held in another type than the file's, and integers, which are refused.
void test_weights(const tl_backend& device, const tl_backend& cpu) {
    const Tiny tiny(kFamilies[0]);
    for (const int type : {TL_F16, TL_BF16}) {
        Model mine(device, tiny.desc, 32, type), reference(cpu, tiny.desc, 32, type);
        for (Model* model : {&mine, &reference}) model->add_cache(TL_CACHE_FP16, 16, 2);
        compare("weights", kFamilies[0], 0, mine.run(sequence(0, 0, 8, 2)), reference.run(sequence(0, 0, 8, 2)));
    }
    tl_options options{};
    options.max_rows = 32;
    options.weights = TL_INT8;
    tl_model* model = nullptr;
    tl_status status{};
    CHECK(device.model_create(&tiny.desc, &options, &model, &status) == TL_UNAVAILABLE);
}

void test_window(const tl_backend& device, const tl_backend& cpu, const Family& family, int mode) {
    const Tiny tiny(family);
    Model mine(device, tiny.desc, 8), reference(cpu, tiny.desc, 8);
    for (Model* model : {&mine, &reference}) model->add_cache(mode, 200, 2, 9);
    compare("a window", family, mode, mine.run(sequence(0, 0, 40, 2)), reference.run(sequence(0, 0, 40, 2)));
}

void test_early_exit(const tl_backend& device, const tl_backend& cpu, const Family& family, int mode) {
    const Tiny tiny(family);
    Model mine(device, tiny.desc, 32), reference(cpu, tiny.desc, 32);
    int early = 0;
    for (const float threshold : {0.3f, 0.9f}) {
        std::vector<tl_row> rows = sequence(0, 0, 12, 6);
        for (tl_row& r : rows) r.exit_threshold = threshold;
        for (Model* model : {&mine, &reference}) {
            if (model->caches.empty()) model->add_cache(mode, 64, 6);
        }
        compare("early exit", family, mode, mine.run(rows), reference.run(rows));
        CHECK(mine.loops_run == reference.loops_run);
        for (int32_t loops : mine.loops_run) early += loops < 6;
        compare("after it", family, mode, mine.run(sequence(0, 12, 14, 6)), reference.run(sequence(0, 12, 14, 6)));
    }
    CHECK(early > 0);
}

// ---------------------------------------------------------------- bits

void test_bits(const tl_backend& device, tinyloop_emulator_controls* emulator, const Family& family, int mode) {
    const Tiny tiny(family);
    Model model(device, tiny.desc, 32);
    for (int i = 0; i < 4; ++i) model.add_cache(mode, 300, 3);
    const std::vector<float> whole = model.run(sequence(0, 0, 24, 3));
    if (emulator) emulator->order = TL_ORDER_REVERSE;
    CHECK(same_bits(model.run(sequence(1, 0, 24, 3), 1), whole));
    if (emulator) emulator->order = TL_ORDER_SHUFFLED;
    CHECK(same_bits(model.run(sequence(2, 0, 24, 3), 7), whole));
    // Beside another lane that is elsewhere.
    std::vector<tl_row> rows = sequence(3, 0, 5, 2);
    const size_t others = rows.size();
    for (const tl_row& r : sequence(0, 0, 24, 3)) rows.push_back(r);
    const std::vector<float> mixed = model.run(rows);
    const auto vocab = static_cast<std::ptrdiff_t>(model.vocab);
    CHECK(same_bits({mixed.begin() + static_cast<std::ptrdiff_t>(others) * vocab, mixed.end()}, whole));
    if (emulator) emulator->order = TL_ORDER_FORWARD;
    // Decode steps, which become graphs, against a pass over all of them, across the first split of attention. What the
    // slots between hold is zero for both.
    const int begin = 120, end = mode == TL_CACHE_FP16 ? 135 : 124;
    const std::vector<float> far = model.run(sequence(1, begin, end, 3));
    std::vector<float> steps;
    for (int p = begin; p < end; ++p) {
        const std::vector<float> one = model.run({row(2, p, 3, TL_ROW_LOGITS)});
        steps.insert(steps.end(), one.begin(), one.end());
    }
    CHECK(same_bits(steps, far));
}

// The accepted path of a draft tree has the bits of the plain sequence, also after its slots are moved together; and a
// copy of a cache goes on as the cache does.
void test_moves(const tl_backend& device, const Family& family, int mode) {
    const Tiny tiny(family);
    Model model(device, tiny.desc, 32);
    for (int positions : {64, 48, 32}) model.add_cache(mode, positions, 2);
    const std::vector<float> plain = model.run(sequence(0, 0, 20, 2));
    const auto of = [&](int position) {
        return std::vector<float>(plain.begin() + position * model.vocab, plain.begin() + (position + 1) * model.vocab);
    };
    const auto like_plain = [](int cache, int position) { return row(cache, position, 2, TL_ROW_LOGITS); };
    for (int p = 0; p < 17; ++p) model.run({like_plain(1, p)});
    tl_row root = like_plain(1, 17), rejected = like_plain(1, 18), child = like_plain(1, 18);
    rejected.token = 5;
    rejected.base = child.base = 17;
    rejected.tree = 3;
    child.slot = 19, child.tree = 5;
    const std::vector<float> tree = model.run({root, rejected, child});
    CHECK(same_bits({tree.begin(), tree.begin() + model.vocab}, of(17)));
    CHECK(same_bits({tree.begin() + 2 * model.vocab, tree.end()}, of(18)));
    tl_status status{};
    CHECK(device.cache_move(model.get(), model.caches[1], 18, 19, &status) == TL_OK);
    CHECK(device.cache_copy(model.get(), model.caches[2], model.caches[1], 19, 2, &status) == TL_OK);
    CHECK(same_bits(model.run({like_plain(1, 19)}), of(19)));
    CHECK(same_bits(model.run({like_plain(2, 19)}), of(19)));
}

// A far row's splits of attention have a block each where there are few rows, and one block where there are many.
void test_splits(const tl_backend& device, int mode, bool brief) {
    const Tiny tiny(kFamilies[3]);
    Model model(device, tiny.desc, 64);
    for (int i = 0; i < 3; ++i) model.add_cache(mode, 200, 2);
    std::vector<tl_row> rows;  // two lanes in turn, so that no two rows share a block; what is before 140 is zero
    for (int p = 140; p < 172; ++p)
        for (int lane : {0, 1}) rows.push_back(row(lane, p, 2, TL_ROW_LOGITS));
    if (brief) rows.resize(6);
    const std::vector<float> together = model.run(rows);
    for (int p = 140; p < 143; ++p) {
        const auto begin = together.begin() + (p - 140) * 2 * model.vocab;
        CHECK(same_bits(model.run({row(2, p, 2, TL_ROW_LOGITS)}), {begin, begin + model.vocab}));
    }
}

// ---------------------------------------------------------------- what crosses to the host

// The first in rank of a row of logits, by their definition.
std::vector<tl_rank> ranked(const float* logits, int vocab, int count) {
    std::vector<tl_rank> out;
    for (int id = 0; id < vocab; ++id)
        if (logits[id] > -INFINITY) out.push_back({logits[id], id});
    std::stable_sort(out.begin(), out.end(), [](const tl_rank& a, const tl_rank& b) { return a.logit > b.logit; });
    out.resize(static_cast<size_t>(count), {-INFINITY, -1});
    return out;
}

// Rows that want the first in rank get what sorting all their logits gives, beside rows that want all.
void check_first(Model& model, const std::vector<tl_row>& rows) {
    std::vector<tl_row> plain = rows;
    for (tl_row& r : plain) r.best = 0;
    const std::vector<float> all = model.run(plain);
    Model::Wanted expected;
    const float* from = all.data();
    for (const tl_row& r : rows) {
        const std::vector<tl_rank> best = ranked(from, model.vocab, r.best);
        expected.best.insert(expected.best.end(), best.begin(), best.end());
        if (!r.best) expected.logits.insert(expected.logits.end(), from, from + model.vocab);
        from += model.vocab;
    }
    const Model::Wanted found = model.first_of(rows);
    CHECK(same_bits(found.logits, expected.logits));
    CHECK(found.best.size() == expected.best.size());
    size_t wrong = 0;
    for (size_t i = 0; i < found.best.size(); ++i)
        wrong += found.best[i].id != expected.best[i].id || found.best[i].logit != expected.best[i].logit;
    CHECK(wrong == 0);
}

// Over three slices, where many tokens have the same logit, and some NaN or infinity.
void test_first_in_rank(const tl_backend& device, tinyloop_emulator_controls* emulator, bool brief) {
    Family family = kFamilies[0];
    family.vocab = 2100;
    const Tiny tiny(family);
    auto* head = const_cast<float*>(static_cast<const float*>(tiny.desc.head.data));
    const auto row_of = [&](int id) { return head + id * family.d_model; };
    for (int id = 40; id < family.vocab; ++id) std::copy_n(row_of(id * 7 % 40), family.d_model, row_of(id));
    Model model(device, tiny.desc, 64);
    for (int i = 0; i < 3; ++i) model.add_cache(TL_CACHE_FP16, 64, 2);
    std::vector<tl_row> rows = sequence(0, 0, brief ? 6 : 40, 2);
    const int wanted[] = {0, 1, 128, 2, 0, 0, 40, 1};
    for (size_t i = 0; i < rows.size(); ++i) rows[i].best = wanted[i % 8];
    check_first(model, rows);
    if (emulator) emulator->order = TL_ORDER_SHUFFLED;
    const uint64_t graphs = emulator ? emulator->graph_runs : 0;
    for (int p = 40; p < (brief ? 41 : 44); ++p) {  // decode steps, which become graphs
        rows.clear();
        for (int lane = 0; lane < 3; ++lane) rows.push_back(row(lane, p, 2, TL_ROW_LOGITS));
        for (tl_row& r : rows) r.best = 5;
        check_first(model, rows);
        rows[1].best = 0;
        check_first(model, rows);
        const uint64_t before = emulator ? emulator->bytes_to_host : 0;
        for (tl_row& r : rows) r.best = 1;
        model.first_of(rows);
        CHECK(!emulator || emulator->bytes_to_host - before == rows.size() * sizeof(tl_rank));
    }
    CHECK(!emulator || brief || emulator->graph_runs > graphs);
    if (emulator) emulator->order = TL_ORDER_FORWARD;

    for (const int id : {3, 700, 2099}) std::fill_n(row_of(id), family.d_model, NAN);
    for (const int id : {1030, 1031}) row_of(id)[0] = INFINITY;  // of either sign, by the row
    for (const int id : {5, 2000}) row_of(id)[0] = -INFINITY;
    Model odd(device, tiny.desc, 64);
    odd.add_cache(TL_CACHE_FP16, 64, 2);
    rows = sequence(0, 0, 3, 2);
    for (tl_row& r : rows) r.best = 9;
    check_first(odd, rows);

    for (int id = 1; id < family.vocab; ++id) std::fill_n(row_of(id), family.d_model, NAN);
    Model single(device, tiny.desc, 64);
    single.add_cache(TL_CACHE_FP16, 64, 2);
    check_first(single, rows);  // one token has a rank, the others are none
}

// The account is exact, and what does not fit is refused without harm.
void test_memory(const tl_backend& device, tinyloop_emulator_controls& emulator) {
    const uint64_t before = emulator.memory_held;
    const Tiny tiny(kFamilies[0]);
    {
        Model model(device, tiny.desc, 32);
        const auto held = [&] { return emulator.memory_held - before; };
        CHECK(held() == device.model_bytes(model.get()));
        for (int mode = 0; mode < 5; ++mode)
            for (const int window : {0, 9}) {
                const tl_cache_desc shape{mode, 50, 3, window};
                const uint64_t without = held();
                model.add_cache(mode, 50, 3, window);
                CHECK(held() - without == device.cache_bytes(model.get(), &shape));
            }
        const uint64_t without = held();
        model.add_states(7);
        CHECK(held() - without == device.states_bytes(model.get(), 7));
        const std::vector<float> expected = model.run(sequence(0, 0, 8, 3));

        emulator.memory_limit = emulator.memory_held + 1000;
        const tl_cache_desc shape{TL_CACHE_FP16, 5000, 3, 0};
        tl_cache* cache = nullptr;
        tl_status status{};
        CHECK(device.cache_create(model.get(), &shape, &cache, &status) == TL_NO_MEMORY);
        // A far position needs a longer table of angles.
        std::vector<float> logits(static_cast<size_t>(model.vocab));
        tl_row far = row(0, 4000, 3, TL_ROW_LOGITS);
        far.slot = far.base = 20;
        CHECK(device.forward(model.get(), model.caches.data(), 1, nullptr, &far, 1, logits.data(), nullptr, nullptr,
                             &status) == TL_NO_MEMORY);
        CHECK(same_bits(model.run(sequence(0, 0, 8, 3)), expected));
        emulator.memory_limit = UINT64_MAX;
    }
    CHECK(emulator.memory_held == before);
    emulator.memory_limit = before + 4000;
    tl_options options{};
    options.max_rows = 32;
    options.weights = TL_AS_STORED;
    tl_model* model = nullptr;
    tl_status status{};
    CHECK(device.model_create(&tiny.desc, &options, &model, &status) == TL_NO_MEMORY);
    emulator.memory_limit = UINT64_MAX;
    CHECK(emulator.memory_held == before);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 2) return 2;
    const bool brief = argc > 2;
    void* library = ::dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (!library) std::printf("%s\n", ::dlerror());
    CHECK(library != nullptr);
    if (!library) return finish();
    const auto entry = reinterpret_cast<tl_backend_entry>(::dlsym(library, "tinyloop_backend"));
    const auto controls = reinterpret_cast<tinyloop_emulator_entry>(::dlsym(library, "tinyloop_emulator"));
    const tl_backend &device = *entry(), &cpu = *tl_cpu_backend();
    tinyloop_emulator_controls* emulator = controls ? controls() : nullptr;
    CHECK(device.abi == TL_BACKEND_ABI && device.size == sizeof(tl_backend));
    test_weights(device, cpu);
    test_first_in_rank(device, emulator, brief);
    for (int mode = 0; mode < 5; ++mode) {
        if (brief && (mode == TL_CACHE_H_FP16 || mode == TL_CACHE_H_INT8)) continue;
        const Family &family = kFamilies[(mode + 1) % 5], &other = kFamilies[(mode + 3) % 5];
        test_against_cpu(device, cpu, family, mode);
        if (mode % 2 == 0) test_splits(device, mode, brief);
        if (brief) continue;
        test_against_cpu(device, cpu, other, mode);
        test_window(device, cpu, other, mode);
        test_early_exit(device, cpu, family, mode);
        test_bits(device, emulator, other, mode);
        test_moves(device, family, mode);
    }
    if (emulator) {
        test_memory(device, *emulator);
        CHECK(brief || emulator->graph_runs > 0);
        CHECK(emulator->memory_held == 0);
    }
    return finish();
}
