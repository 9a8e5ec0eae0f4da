// The Python face of engine.h: a table of contents. Every argument is named, the GIL is released while computing, and
// every Error becomes its class of native/errors.py. Model.pyi-style documentation lives in _core.pyi.
#include <pybind11/numpy.h>

#include "bindings_values.h"

using namespace pybind11::literals;
using namespace tinyloop;

namespace {

py::dict stats_dict(const GenerateStats& s) {
    return py::dict("prefill_ms"_a = s.prefill_ms, "first_token_ms"_a = s.first_token_ms, "decode_ms"_a = s.decode_ms,
                    "stop_reason"_a = s.stop_reason, "prompt_tokens"_a = s.prompt_tokens,
                    "generated_tokens"_a = s.generated_tokens, "loops"_a = s.loops, "prefix_tokens"_a = s.prefix_tokens,
                    "loops_skipped"_a = s.loops_skipped, "drafted"_a = s.drafted, "accepted"_a = s.accepted,
                    "mean_loops"_a = s.mean_loops, "grammar_ms"_a = s.grammar_ms, "cache_bytes"_a = s.cache_bytes);
}

// Ctrl-C reaches a long call at its next token.
void check_signals() {
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// A callback's None means go on; any other answer is its truth.
bool goes_on(const py::object& answer) { return answer.is_none() || answer.cast<bool>(); }

// `on_token` must outlive the callback.
TokenCallback callback_of(const py::object& on_token) {
    return [&on_token](int32_t token, int position) {
        py::gil_scoped_acquire held;
        check_signals();
        return on_token.is_none() || goes_on(on_token(token, position));
    };
}

class PyModel {
  public:
    PyModel(const py::object& path, const LoadOptions& options) {
        const std::string name = py::module_::import("os").attr("fspath")(path).cast<std::string>();
        py::gil_scoped_release released;
        model_ = std::shared_ptr<Model>(load_model(name, options), free_model);
    }

    // A call in progress keeps the model alive until it ends.
    std::shared_ptr<Model> get() const {
        if (!model_) refuse(ErrorKind::closed, "model", "closed", "a model that is open");
        return model_;
    }
    void close() { model_.reset(); }

    Generation stream(const py::object& prompt, const GenerateConfig& config, const py::object& on_token) const {
        const std::shared_ptr<Model> model = get();
        const Tokens tokens = tokens_of("prompt", prompt);
        const TokenCallback callback = callback_of(on_token);
        py::gil_scoped_release released;
        return generate_stream(model.get(), tokens.data(), tokens.size(), config, callback);
    }

    Generation speculative(const py::object& prompt, const SpeculativeConfig& speculative, const GenerateConfig& config,
                           const py::object& on_token, bool tree) const {
        const std::shared_ptr<Model> model = get();
        const Tokens tokens = tokens_of("prompt", prompt);
        const TokenCallback callback = callback_of(on_token);
        py::gil_scoped_release released;
        return (tree ? generate_tree_speculative : generate_speculative)(model.get(), tokens.data(), tokens.size(),
                                                                         speculative, config, callback);
    }

    std::vector<Generation> batch(const py::object& prompts, const py::object& config,
                                  const py::object& on_step) const {
        const std::shared_ptr<Model> model = get();
        const std::vector<Tokens> tokens = sequences_of("prompts", prompts);
        const std::vector<GenerateConfig> configs = py::isinstance<GenerateConfig>(config)
                                                        ? std::vector{config.cast<GenerateConfig>()}
                                                        : config.cast<std::vector<GenerateConfig>>();
        const StepCallback callback = [&](const std::vector<int32_t>& step, std::vector<bool>& cancel) {
            py::gil_scoped_acquire held;
            check_signals();
            if (on_step.is_none()) return true;
            py::list lanes;
            for (const int32_t token : step) lanes.append(token < 0 ? py::object(py::none()) : py::int_(token));
            const py::object answer = on_step(lanes);
            if (!py::isinstance<py::sequence>(answer)) return goes_on(answer);
            for (const py::handle lane : answer) {
                const size_t number =
                    static_cast<size_t>(narrow<int32_t>("on_step's answer", py::cast<py::int_>(lane)));
                if (number >= cancel.size())
                    refuse(ErrorKind::config, "on_step's answer", std::to_string(number), "lane numbers of this batch");
                cancel[number] = true;
            }
            return true;
        };
        py::gil_scoped_release released;
        return generate_batch(model.get(), tokens, configs, callback);
    }

    py::array_t<float> all_logits(const py::object& tokens_object, const py::int_& loops, const CacheMode& cache_mode,
                                  const py::int_& cache_window) const {
        const std::shared_ptr<Model> model = get();
        const Tokens tokens = tokens_of("tokens", tokens_object);
        const int asked = narrow<int>("loops", loops), window = narrow<int>("cache_window", cache_window);
        const std::string mode = name_of(cache_mode);
        std::vector<float> out;
        {
            py::gil_scoped_release released;
            out = logits(model.get(), tokens.data(), tokens.size(), asked, mode, window);
        }
        return py::array_t<float>({tokens.size(), static_cast<size_t>(artifact(model.get()).config.vocab_size)},
                                  out.data());
    }

  private:
    std::shared_ptr<Model> model_;
};

// A handle and the model it belongs to, which it keeps alive. Free: the engine's function that frees it.
template <class Handle, void (*Free)(Handle*)>
class PyHandle {
  public:
    PyHandle(std::shared_ptr<Model> model, Handle* handle) : model_(std::move(model)), handle_(handle, Free) {}

    std::shared_ptr<Handle> get() const {
        if (!handle_) refuse(ErrorKind::closed, "handle", "closed", "a handle that is open");
        return handle_;
    }
    void close() { handle_.reset(); }
    void keep(std::shared_ptr<Model> model) { model_ = std::move(model); }

  private:
    std::shared_ptr<Model> model_;  // freed after the handle
    std::shared_ptr<Handle> handle_;
};

using PyPrefix = PyHandle<PrefixCache, free_prefix_cache>;
using PyPool = PyHandle<PrefixPool, free_prefix_pool>;
using PyResume = PyHandle<ResumeHandle, free_resume_handle>;

PyPrefix make_prefix(const PyModel& owner, const py::object& tokens_object, const py::int_& n_loops,
                     const CacheMode& cache_mode, const std::optional<double>& exit_threshold) {
    const std::shared_ptr<Model> model = owner.get();
    const Tokens tokens = tokens_of("tokens", tokens_object);
    const int loops = narrow<int>("n_loops", n_loops);
    const std::string mode = name_of(cache_mode);
    const double threshold = exit_threshold ? *exit_threshold : default_exit_threshold();
    py::gil_scoped_release released;
    return PyPrefix(model, create_prefix_cache(model.get(), tokens.data(), tokens.size(), loops, mode, threshold));
}

Generation from_prefix(const PyModel& owner, const PyPrefix& prefix, const py::object& suffix,
                       const GenerateConfig& config, const py::object& on_token) {
    const std::shared_ptr<Model> model = owner.get();
    const std::shared_ptr<PrefixCache> handle = prefix.get();
    const Tokens tokens = tokens_of("suffix", suffix);
    const TokenCallback callback = callback_of(on_token);
    py::gil_scoped_release released;
    return generate_from_prefix_cache(model.get(), handle.get(), tokens.data(), tokens.size(), config, callback);
}

void add_prefix(PyPool& pool, const PyModel& owner, const py::object& tokens_object, const py::int_& n_loops,
                const CacheMode& cache_mode) {
    const std::shared_ptr<Model> model = owner.get();
    const std::shared_ptr<PrefixPool> handle = pool.get();
    const Tokens tokens = tokens_of("tokens", tokens_object);
    const int loops = narrow<int>("n_loops", n_loops);
    const std::string mode = name_of(cache_mode);
    py::gil_scoped_release released;
    register_prefix(handle.get(), model.get(), tokens.data(), tokens.size(), loops, mode);
    pool.keep(model);
}

Generation with_pool(const PyModel& owner, const PyPool& pool, const py::object& prompt, const GenerateConfig& config,
                     const py::object& on_token) {
    const std::shared_ptr<Model> model = owner.get();
    const std::shared_ptr<PrefixPool> handle = pool.get();
    const Tokens tokens = tokens_of("prompt", prompt);
    const TokenCallback callback = callback_of(on_token);
    py::gil_scoped_release released;
    return generate_with_pool(model.get(), handle.get(), tokens.data(), tokens.size(), config, callback);
}

PyResume make_resume(const PyModel& owner, const py::object& prompt, const py::int_& loops_used_,
                     const CacheMode& cache_mode, const py::int_& cache_window) {
    const std::shared_ptr<Model> model = owner.get();
    const Tokens tokens = tokens_of("prompt", prompt);
    const int loops = narrow<int>("loops_used", loops_used_), window = narrow<int>("cache_window", cache_window);
    const std::string mode = name_of(cache_mode);
    py::gil_scoped_release released;
    return PyResume(model, create_resume_handle(model.get(), tokens.data(), tokens.size(), loops, mode, window));
}

Generation resume(const PyModel& owner, const PyResume& resumed, const py::int_& loops, const GenerateConfig& config,
                  const py::object& on_token) {
    const std::shared_ptr<Model> model = owner.get();
    const std::shared_ptr<ResumeHandle> handle = resumed.get();
    const int wanted = narrow<int>("loops", loops);
    const TokenCallback callback = callback_of(on_token);
    py::gil_scoped_release released;
    return resume_generate(model.get(), handle.get(), wanted, config, callback);
}

py::dict metadata_dict(const ArtifactInfo& info) {
    py::dict out;
    for (const auto& [key, value] : info.metadata) out[py::str(key)] = value;
    return out;
}

py::dict inspect(const py::object& path) {
    const std::string name = py::module_::import("os").attr("fspath")(path).cast<std::string>();
    ArtifactInfo info;
    {
        py::gil_scoped_release released;
        info = inspect_artifact(name);
    }
    static constexpr const char* kDtypes[] = {"F32", "F16", "BF16", "", "I8", "U8"};
    py::list tensors;
    for (const TensorInfo& t : info.tensors)
        tensors.append(
            py::dict("name"_a = t.name, "dtype"_a = kDtypes[t.dtype], "shape"_a = t.shape, "bytes"_a = t.bytes));
    return py::dict("metadata"_a = metadata_dict(info), "tensors"_a = tensors, "file_bytes"_a = info.file_bytes,
                    "parameters"_a = info.parameters, "fingerprint"_a = info.fingerprint);
}

}  // namespace

PYBIND11_MODULE(_core, m) {
    py::register_exception_translator(translate);

    py::class_<GenerateConfig>(m, "GenerateConfig")
        .def(py::init(&make_config), py::kw_only(), "loops"_a = 0, "max_tokens"_a = 128, "temperature"_a = 0.0,
             "top_k"_a = 0, "top_p"_a = 1.0, "min_p"_a = 0.0, "repetition_penalty"_a = 1.0, "seed"_a = 0,
             "stop_sequences"_a = py::tuple(), "grammar"_a = py::none(), "cache_mode"_a = py::none(),
             "cache_window"_a = 0, "beam_size"_a = 1, "length_penalty"_a = 1.0, "exit_threshold"_a = py::none(),
             "ignore_eos"_a = false, "speculative"_a = py::none())
        .def_readonly("loops", &GenerateConfig::loops)
        .def_readonly("max_tokens", &GenerateConfig::max_tokens)
        .def_readonly("temperature", &GenerateConfig::temperature)
        .def_readonly("top_k", &GenerateConfig::top_k)
        .def_readonly("top_p", &GenerateConfig::top_p)
        .def_readonly("min_p", &GenerateConfig::min_p)
        .def_readonly("repetition_penalty", &GenerateConfig::repetition_penalty)
        .def_readonly("seed", &GenerateConfig::seed)
        .def_readonly("stop_sequences", &GenerateConfig::stop_sequences)
        .def_readonly("cache_mode", &GenerateConfig::cache_mode)
        .def_readonly("cache_window", &GenerateConfig::cache_window)
        .def_readonly("beam_size", &GenerateConfig::beam_size)
        .def_readonly("length_penalty", &GenerateConfig::length_penalty)
        .def_readonly("exit_threshold", &GenerateConfig::exit_threshold)
        .def_readonly("ignore_eos", &GenerateConfig::ignore_eos)
        .def_readonly("speculative", &GenerateConfig::speculative);

    py::class_<SpeculativeConfig>(m, "SpeculativeConfig")
        .def(py::init(&make_speculative), py::kw_only(), "draft_loops"_a = 2, "verify_loops"_a = 0, "draft_ahead"_a = 4,
             "draft_margin"_a = 0.0, "branches"_a = 2)
        .def_readonly("draft_loops", &SpeculativeConfig::draft_loops)
        .def_readonly("verify_loops", &SpeculativeConfig::verify_loops)
        .def_readonly("draft_ahead", &SpeculativeConfig::draft_ahead)
        .def_readonly("draft_margin", &SpeculativeConfig::draft_margin)
        .def_readonly("branches", &SpeculativeConfig::branches);

    py::class_<GenerateStats>(m, "GenerateStats")
        .def_readonly("prefill_ms", &GenerateStats::prefill_ms)
        .def_readonly("first_token_ms", &GenerateStats::first_token_ms)
        .def_readonly("decode_ms", &GenerateStats::decode_ms)
        .def_readonly("stop_reason", &GenerateStats::stop_reason)
        .def_readonly("prompt_tokens", &GenerateStats::prompt_tokens)
        .def_readonly("generated_tokens", &GenerateStats::generated_tokens)
        .def_readonly("loops", &GenerateStats::loops)
        .def_readonly("prefix_tokens", &GenerateStats::prefix_tokens)
        .def_readonly("loops_skipped", &GenerateStats::loops_skipped)
        .def_readonly("drafted", &GenerateStats::drafted)
        .def_readonly("accepted", &GenerateStats::accepted)
        .def_readonly("mean_loops", &GenerateStats::mean_loops)
        .def_readonly("grammar_ms", &GenerateStats::grammar_ms)
        .def_readonly("cache_bytes", &GenerateStats::cache_bytes)
        .def("asdict", &stats_dict);

    py::class_<Generation>(m, "Generation")
        .def_readonly("tokens", &Generation::tokens)
        .def_readonly("stats", &Generation::stats)
        .def_property_readonly("beams", [](const Generation& self) {
            py::list out;
            for (const Beam& beam : self.beams) out.append(py::make_tuple(beam.tokens, beam.score));
            return out;
        });

    py::class_<PyPrefix>(m, "PrefixCache")
        .def("close", &PyPrefix::close)
        .def_property_readonly("tokens", [](const PyPrefix& self) { return prefix_tokens(self.get().get()); })
        .def_property_readonly("bytes", [](const PyPrefix& self) { return handle_bytes(self.get().get()); });

    py::class_<PyResume>(m, "ResumeHandle")
        .def("close", &PyResume::close)
        .def_property_readonly("loops_used", [](const PyResume& self) { return loops_used(self.get().get()); })
        .def_property_readonly("bytes", [](const PyResume& self) { return handle_bytes(self.get().get()); });

    py::class_<PyModel>(m, "Model")
        .def(py::init([](const py::object& path, const py::int_& max_seq_len, const py::int_& threads,
                         const std::string& simd, const py::int_& prefill_chunk, const std::string& device,
                         const std::string& weights, const std::string& affinity) {
                 return std::make_unique<PyModel>(
                     path, LoadOptions{narrow<int>("max_seq_len", max_seq_len), narrow<int>("threads", threads), simd,
                                       narrow<int>("prefill_chunk", prefill_chunk), device, weights, affinity});
             }),
             "path"_a, py::kw_only(), "max_seq_len"_a = 0, "threads"_a = 0, "simd"_a = "auto", "prefill_chunk"_a = 256,
             "device"_a = "cpu", "weights"_a = "auto", "affinity"_a = "none")
        .def(
            "generate",
            [](const PyModel& self, const py::object& prompt, const GenerateConfig& config) {
                return self.stream(prompt, config, py::none());
            },
            "prompt"_a, "config"_a)
        .def("generate_stream", &PyModel::stream, "prompt"_a, "config"_a, "on_token"_a)
        .def("generate_batch", &PyModel::batch, "prompts"_a, "config"_a, "on_step"_a = py::none())
        .def(
            "generate_speculative",
            [](const PyModel& self, const py::object& prompt, const SpeculativeConfig& speculative,
               const GenerateConfig& config,
               const py::object& on_token) { return self.speculative(prompt, speculative, config, on_token, false); },
            "prompt"_a, "speculative"_a, "config"_a, "on_token"_a = py::none())
        .def(
            "generate_tree_speculative",
            [](const PyModel& self, const py::object& prompt, const SpeculativeConfig& speculative,
               const GenerateConfig& config,
               const py::object& on_token) { return self.speculative(prompt, speculative, config, on_token, true); },
            "prompt"_a, "speculative"_a, "config"_a, "on_token"_a = py::none())
        .def("create_prefix_cache", &make_prefix, "tokens"_a, "n_loops"_a = 0, "cache_mode"_a = py::none(),
             "exit_threshold"_a = py::none())
        .def("generate_from_prefix_cache", &from_prefix, "prefix"_a, "suffix"_a, "config"_a, "on_token"_a = py::none())
        .def("generate_with_pool", &with_pool, "pool"_a, "prompt"_a, "config"_a, "on_token"_a = py::none())
        .def("create_resume_handle", &make_resume, "prompt"_a, "loops_used"_a, "cache_mode"_a = py::none(),
             "cache_window"_a = 0)
        .def("resume_generate", &resume, "handle"_a, "loops"_a, "config"_a, "on_token"_a = py::none())
        .def("logits", &PyModel::all_logits, "tokens"_a, "loops"_a = 0, "cache_mode"_a = py::none(),
             "cache_window"_a = 0)
        .def(
            "cache_bytes",
            [](const PyModel& self, const py::int_& tokens, const CacheMode& mode, const py::int_& loops,
               const py::int_& window) {
                return cache_bytes(self.get().get(), narrow<int>("tokens", tokens), name_of(mode),
                                   narrow<int>("loops", loops), narrow<int>("cache_window", window));
            },
            "tokens"_a, "cache_mode"_a = py::none(), "loops"_a = 0, "cache_window"_a = 0)
        .def(
            "states_bytes",
            [](const PyModel& self, const py::int_& tokens) {
                return states_bytes(self.get().get(), narrow<int>("tokens", tokens));
            },
            "tokens"_a)
        .def("close", &PyModel::close)
        .def_property_readonly("metadata",
                               [](const PyModel& self) { return metadata_dict(artifact(self.get().get())); })
        .def_property_readonly("fingerprint",
                               [](const PyModel& self) { return artifact(self.get().get()).fingerprint; })
        .def_property_readonly("parameters", [](const PyModel& self) { return artifact(self.get().get()).parameters; })
        .def_property_readonly("max_seq_len", [](const PyModel& self) { return max_seq_len(self.get().get()); })
        .def_property_readonly("threads", [](const PyModel& self) { return threads(self.get().get()); })
        .def_property_readonly("cpus", [](const PyModel& self) { return cpus(self.get().get()); })
        .def_property_readonly("device", [](const PyModel& self) { return device_level(self.get().get()); })
        .def_property_readonly("device_free_bytes",
                               [](const PyModel& self) { return device_free_bytes(self.get().get()); })
        .def_property_readonly("weights", [](const PyModel& self) { return weight_format(self.get().get()); })
        .def_property_readonly("weight_bytes", [](const PyModel& self) { return weight_bytes(self.get().get()); })
        .def_property_readonly("step_counter", [](const PyModel& self) { return step_counter(self.get().get()); });

    py::class_<PyPool>(m, "PrefixPool")
        .def(py::init([](const py::int_& capacity) {
                 return std::make_unique<PyPool>(nullptr, create_prefix_pool(narrow<int>("capacity", capacity)));
             }),
             "capacity"_a)
        .def("register_prefix", &add_prefix, "model"_a, "tokens"_a, "n_loops"_a = 0, "cache_mode"_a = py::none())
        .def("close", &PyPool::close)
        .def("__len__", [](const PyPool& self) { return pool_size(self.get().get()); })
        .def_property_readonly("bytes", [](const PyPool& self) { return handle_bytes(self.get().get()); });

    m.def("inspect_artifact", &inspect, "path"_a);
    m.def("devices", [] {
        py::list out;
        for (const DeviceFacts& d : devices())
            out.append(py::dict("name"_a = d.name, "description"_a = d.description, "reason"_a = d.reason,
                                "total_bytes"_a = d.total_bytes));
        return out;
    });
    m.def("simd_levels", &simd_levels);
}
