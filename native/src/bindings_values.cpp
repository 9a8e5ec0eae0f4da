#include "bindings_values.h"

#include <algorithm>

namespace tinyloop {

using namespace pybind11::literals;

namespace {

const char* class_of(ErrorKind kind) {
    switch (kind) {
        case ErrorKind::artifact:
            return "ArtifactError";
        case ErrorKind::config:
            return "ConfigError";
        case ErrorKind::limit:
            return "LimitError";
        case ErrorKind::mode:
            return "ModeError";
        case ErrorKind::busy:
            return "ModelBusyError";
        case ErrorKind::closed:
            return "ClosedError";
        case ErrorKind::unavailable:
            return "BackendUnavailable";
        case ErrorKind::failed:
            return "BackendFailed";
        case ErrorKind::memory:
            return "OutOfMemoryError";
    }
    return "TinyLoopError";
}

}  // namespace

void translate(std::exception_ptr pointer) {
    try {
        if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
        const py::object type = py::module_::import("tinyloop_serve.native.errors").attr(class_of(error.kind));
        const py::object raised =
            type(error.what(), "field"_a = error.field, "value"_a = error.value, "accepted"_a = error.accepted);
        PyErr_SetObject(type.ptr(), raised.ptr());
    }
}

std::string name_of(const CacheMode& cache_mode) { return cache_mode ? *cache_mode : default_cache_mode(); }

Tokens tokens_of(const std::string& field, const py::handle& sequence) {
    if (!py::isinstance<py::sequence>(sequence) || py::isinstance<py::str>(sequence))
        refuse(ErrorKind::config, field, py::repr(sequence), "a sequence of token ids");
    Tokens out;
    for (const py::handle item : sequence) {
        const std::string name = field + "[" + std::to_string(out.size()) + "]";
        if (!PyIndex_Check(item.ptr())) refuse(ErrorKind::config, name, py::repr(item), "a token id");
        out.push_back(narrow<int32_t>(name.c_str(), py::reinterpret_steal<py::int_>(PyNumber_Index(item.ptr()))));
    }
    return out;
}

std::vector<Tokens> sequences_of(const std::string& field, const py::handle& sequences) {
    if (!py::isinstance<py::sequence>(sequences) || py::isinstance<py::str>(sequences))
        refuse(ErrorKind::config, field, py::repr(sequences), "a list of sequences of token ids");
    std::vector<Tokens> out;
    for (const py::handle item : sequences)
        out.push_back(tokens_of(field + "[" + std::to_string(out.size()) + "]", item));
    return out;
}

namespace {

// A grammar in Python (grammar.py): `start()` gives a state with `allowed(words: memoryview of u32)`, `accept(token)`,
// `finished()`. Called with the GIL taken for each; its errors pass through the call.
class PyGrammarState : public GrammarState {
  public:
    PyGrammarState(py::object state, size_t words) : state_(std::move(state)), words_(words) {}
    ~PyGrammarState() override {
        py::gil_scoped_acquire held;
        state_ = py::object();
    }
    void allowed(uint32_t* words) override {
        py::gil_scoped_acquire held;
        state_.attr("allowed")(py::memoryview::from_memory(words, static_cast<py::ssize_t>(words_ * sizeof(uint32_t))));
    }
    void accept(int32_t token) override {
        py::gil_scoped_acquire held;
        state_.attr("accept")(token);
    }
    bool finished() override {
        py::gil_scoped_acquire held;
        return state_.attr("finished")().cast<bool>();
    }

  private:
    py::object state_;
    size_t words_;
};

// Keeps the Python grammar alive however the config is copied; the last copy may go without the GIL held.
Grammar grammar_of(const py::object& grammar) {
    if (grammar.is_none()) return {};
    if (!py::hasattr(grammar, "start") || !py::hasattr(grammar, "vocab_size"))
        refuse(ErrorKind::config, "grammar", py::repr(grammar), "a Grammar or None");
    const int vocab_size = narrow<int>("grammar.vocab_size", py::cast<py::int_>(grammar.attr("vocab_size")));
    const size_t words = (static_cast<size_t>(std::max(vocab_size, 0)) + 31) / 32;
    std::shared_ptr<py::object> shared(new py::object(grammar), [](py::object* object) {
        py::gil_scoped_acquire held;
        delete object;
    });
    return {vocab_size, [shared, words]() -> std::unique_ptr<GrammarState> {
                py::gil_scoped_acquire held;
                return std::make_unique<PyGrammarState>(shared->attr("start")(), words);
            }};
}

}  // namespace

GenerateConfig make_config(const py::int_& loops, const py::int_& max_tokens, double temperature, const py::int_& top_k,
                           double top_p, double min_p, double repetition_penalty, const py::int_& seed,
                           const py::object& stop_sequences, const py::object& grammar, const CacheMode& cache_mode,
                           const py::int_& cache_window, const py::int_& beam_size, double length_penalty,
                           const std::optional<double>& exit_threshold, bool ignore_eos,
                           const std::optional<bool>& speculative) {
    GenerateConfig c;
    c.loops = narrow<int>("loops", loops);
    c.max_tokens = narrow<int>("max_tokens", max_tokens);
    c.temperature = temperature;
    c.top_k = narrow<int>("top_k", top_k);
    c.top_p = top_p;
    c.min_p = min_p;
    c.repetition_penalty = repetition_penalty;
    c.seed = narrow<uint64_t>("seed", seed);
    c.stop_sequences = sequences_of("stop_sequences", stop_sequences);
    c.grammar = grammar_of(grammar);
    c.cache_mode = name_of(cache_mode);
    c.cache_window = narrow<int>("cache_window", cache_window);
    c.beam_size = narrow<int>("beam_size", beam_size);
    c.length_penalty = length_penalty;
    c.exit_threshold = exit_threshold ? *exit_threshold : default_exit_threshold();
    c.ignore_eos = ignore_eos;
    c.speculative = speculative ? *speculative : default_speculative();
    return c;
}

SpeculativeConfig make_speculative(const py::int_& draft_loops, const py::int_& verify_loops,
                                   const py::int_& draft_ahead, double draft_margin, const py::int_& branches) {
    return {narrow<int>("draft_loops", draft_loops), narrow<int>("verify_loops", verify_loops),
            narrow<int>("draft_ahead", draft_ahead), draft_margin, narrow<int>("branches", branches)};
}

}  // namespace tinyloop
