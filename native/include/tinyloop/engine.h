// The whole native API: load a model, generate from it. bindings.cpp wraps exactly this.
//
// Ownership: load_model gives a Model that free_model takes back. Threads: a Model is not re-entrant; a call that
// overlaps another on the same model throws ErrorKind::busy and disturbs nothing. step_counter may be read from any
// thread at any time. Callbacks run on the calling thread. Every refusal is an Error (errors.h), thrown before any
// work.
//
// Promise (SPEC 2.5): the tokens are a pure function of (artifact, prompt, config); not of the batch, the lanes beside,
// the threads, the SIMD level or the chunking of the prefill.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tinyloop/errors.h"

namespace tinyloop {

struct ModelConfig {
    int vocab_size = 0, d_model = 0, n_heads = 0, n_kv_heads = 0, head_dim = 0, d_ffn = 0;
    int n_prelude = 0, n_core = 0, n_coda = 0;
    int loops = 0;                                     // default per token
    int max_loops = 0;                                 // the most a request may ask for
    int max_seq_len = 0;                               // positions
    int norm = 0, injection = 0, start = 0, rope = 0;  // tl_norm, tl_injection, tl_start, tl_rope
    bool loop_norm = false, core_norm = false, final_norm = true;
    bool qk_norm = false, qk_bias = false, v_bias = false, tied_head = false, add_bos = false, exit_gate = false;
    double norm_eps = 0, rope_theta = 0, embed_scale = 1, logit_scale = 1;
    int bos_id = -1;  // -1: none
    std::vector<int> eos_ids;
};

struct TensorInfo {
    std::string name;
    int dtype = 0;  // tl_dtype
    std::vector<int64_t> shape;
    uint64_t bytes = 0;
};

struct ArtifactInfo {
    ModelConfig config;
    std::vector<std::pair<std::string, std::string>> metadata;  // as in the file: config, tokenizer, card, ...
    std::vector<TensorInfo> tensors;                            // in file order
    uint64_t file_bytes = 0;
    uint64_t parameters = 0;
    std::string fingerprint;  // hex; a 128-bit hash of all bytes of the file (not cryptographic)
};

// Validates the whole file and reads no tensor data beyond hashing it.
ArtifactInfo inspect_artifact(const std::string& path);

struct LoadOptions {
    int max_seq_len = 0;         // positions; 0 = the artifact's
    int threads = 0;             // 0 = TINYLOOP_THREADS, else all cores this process may use
    std::string simd = "auto";   // or "portable", "avx2", "avx512"
    int prefill_chunk = 256;     // the most rows of one forward pass
    std::string device = "cpu";  // or a plug-in's: "cuda" (its first device), "cuda:1", ...
    // What matrices are held in: "fp16", "bf16", "int8" or "int4" (embedding and head: int8); "auto" =
    // TINYLOOP_WEIGHTS, else as the artifact has them. Part of what determines the tokens, as the artifact is.
    std::string weights = "auto";
    // The processors of the engine's own threads: "none"; "auto", one of this process's for each thread if there are
    // enough; or a list such as "0,2-5", which also sets the default of `threads`. The calling thread is never moved:
    // it counts as the first, and that processor is left to it.
    std::string affinity = "none";
};

// What a lane may say next. One state per lane and call; the core applies the mask on the host.
class GrammarState {
  public:
    virtual ~GrammarState() = default;
    // Sets bit `id % 32` of words[id / 32] for every token that may come next; words: (vocab_size + 31) / 32, zeroed.
    virtual void allowed(uint32_t* words) = 0;
    virtual void accept(int32_t token) = 0;
    // Nothing but the end may follow.
    virtual bool finished() = 0;
};
// A compiled grammar: `start` gives a fresh state. Empty: none.
struct Grammar {
    int vocab_size = 0;  // of the model it was compiled for
    std::function<std::unique_ptr<GrammarState>()> start;
    explicit operator bool() const { return static_cast<bool>(start); }
};

// What the environment says of a field that a caller was not given: TINYLOOP_CACHE_MODE, else "fp16";
// TINYLOOP_EARLY_EXIT, else 0; TINYLOOP_SPECULATIVE (0 or 1), else false. For the edge where that is known
// (bindings.cpp): nothing below it reads them. They throw ErrorKind::config, naming the variable.
std::string default_cache_mode();
double default_exit_threshold();
bool default_speculative();

struct GenerateConfig {
    int loops = 0;  // core iterations per token; 0 = the artifact's default
    int max_tokens = 128;
    double temperature = 0;  // 0 = greedy
    int top_k = 0;           // 0 = off
    double top_p = 1;
    double min_p = 0;
    double repetition_penalty = 1;
    uint64_t seed = 0;
    std::vector<std::vector<int32_t>> stop_sequences;
    Grammar grammar;
    // "fp16", "int8", or the stored inputs "h_fp16", "h_int8", "int4"
    std::string cache_mode = "fp16";
    int cache_window = 0;  // positions; 0 = all
    int beam_size = 1;
    double length_penalty = 1;  // beams rank by log-probability / length^length_penalty
    double exit_threshold = 0;  // 0 = every loop runs; see tl_row
    // generate and generate_stream decode with self-speculation where the mode matrix allows it: the same tokens.
    bool speculative = false;
    bool ignore_eos = false;
};

struct SpeculativeConfig {
    int draft_loops = 2;
    int verify_loops = 0;     // 0 = the request's loops
    int draft_ahead = 4;      // rows of each verification: the last token and up to draft_ahead - 1 drafts
    double draft_margin = 0;  // drafting stops where the draft's best logit leads the next by less; 0 = never
    int branches = 2;         // tree only: candidates for the first drafted token
};

struct GenerateStats {
    double prefill_ms = 0, first_token_ms = 0, decode_ms = 0;  // first_token_ms counts from the call
    std::string stop_reason;  // "eos", "stop_sequence", "max_tokens", "grammar", "cancelled"
    int prompt_tokens = 0, generated_tokens = 0, loops = 0;
    int prefix_tokens = 0;  // of the prompt, not computed again
    int loops_skipped = 0;  // of the prompt's tokens, by a warm start
    int drafted = 0, accepted = 0;
    double mean_loops = 0;  // run per decoded token; less than `loops` where exit_threshold ended them
    double grammar_ms = 0;  // computing and applying masks
    uint64_t cache_bytes = 0;
};

struct Beam {
    std::vector<int32_t> tokens;
    double score = 0;  // log-probability / length^length_penalty
};

// Every sampled token is in `tokens`, the EOS or the stop sequence's tokens included.
struct Generation {
    std::vector<int32_t> tokens;
    GenerateStats stats;
    std::vector<Beam> beams;  // beam search: beam_size answers, best first; the first is `tokens`
};

struct DeviceFacts {
    std::string name;          // what LoadOptions::device takes: "cpu", "cuda:0"; "cuda" where there is none
    std::string description;   // "NVIDIA H200"
    std::string reason;        // why it cannot be used; empty: it can
    uint64_t total_bytes = 0;  // the device's own memory; 0: it computes in the host's
};
// The CPU, every device of the plug-ins found, and "cuda" with the reason where it is not there.
std::vector<DeviceFacts> devices();

class Model;

Model* load_model(const std::string& path, int max_seq_len);
Model* load_model(const std::string& path, const LoadOptions& options);
void free_model(Model* model);

const ArtifactInfo& artifact(const Model* model);
int max_seq_len(const Model* model);
std::string device_level(const Model* model);  // "cpu/avx2", "cuda:0/sm_90"
int threads(const Model* model);
std::string weight_format(const Model* model);     // "fp16", "int8", ...; "mixed" when the artifact's matrices differ
uint64_t step_counter(const Model* model);         // grows while the core works
uint64_t weight_bytes(const Model* model);         // memory held by weights and work space
int64_t device_free_bytes(const Model* model);     // that the device has left; -1: it computes in the host's memory
const std::vector<int>& cpus(const Model* model);  // (threads) of an affinity, the caller's first; empty: none
// Bytes that `tokens` positions take at `loops` (0 = default), with a window (0 = none).
uint64_t cache_bytes(const Model* model, int tokens, const std::string& cache_mode, int loops, int cache_window = 0);
// Bytes of the states that a ResumeHandle of so many tokens, or a draft, keeps beside its cache.
uint64_t states_bytes(const Model* model, int tokens);

// (token, its position in the whole sequence) -> go on?
using TokenCallback = std::function<bool(int32_t token, int position)>;
// tokens[lane] is -1 for a lane that has stopped. The callback may set cancel[lane]; returning false cancels all lanes.
using StepCallback = std::function<bool(const std::vector<int32_t>& tokens, std::vector<bool>& cancel)>;

Generation generate(Model* model, const int32_t* prompt, size_t prompt_len, const GenerateConfig& config);
Generation generate_stream(Model* model, const int32_t* prompt, size_t prompt_len, const GenerateConfig& config,
                           const TokenCallback& on_token);
// Static lockstep batch. configs: one for all lanes, or one per lane, which may differ only in seed, max_tokens,
// stop_sequences and ignore_eos.
std::vector<Generation> generate_batch(Model* model, const std::vector<std::vector<int32_t>>& prompts,
                                       const std::vector<GenerateConfig>& configs, const StepCallback& on_step = {});

// ---- reuse. A handle belongs to one model (another one is refused), is not re-entrant (refused too) and is never
// changed by the calls that use it. It must be freed before its model.

// The cache of a prompt's first tokens at n_loops.
class PrefixCache;
PrefixCache* create_prefix_cache(Model* model, const int32_t* tokens, size_t count, int n_loops,
                                 const std::string& cache_mode = "fp16", double exit_threshold = 0);
void free_prefix_cache(PrefixCache* prefix);
uint64_t handle_bytes(const PrefixCache* prefix);
const std::vector<int32_t>& prefix_tokens(const PrefixCache* prefix);
// The prompt is the prefix's tokens, then `suffix` (which may be empty). config.loops and cache_mode must be the
// prefix's.
Generation generate_from_prefix_cache(Model* model, PrefixCache* prefix, const int32_t* suffix, size_t suffix_len,
                                      const GenerateConfig& config, const TokenCallback& on_token = {});

// Prefixes of many prompts; the longest that matches wins, the least recently used goes when there are more than
// capacity.
class PrefixPool;
PrefixPool* create_prefix_pool(int capacity);
void free_prefix_pool(PrefixPool* pool);
void register_prefix(PrefixPool* pool, Model* model, const int32_t* tokens, size_t count, int n_loops,
                     const std::string& cache_mode = "fp16");
int pool_size(const PrefixPool* pool);
uint64_t handle_bytes(const PrefixPool* pool);
// Without a match it is generate_stream.
Generation generate_with_pool(Model* model, PrefixPool* pool, const int32_t* prompt, size_t prompt_len,
                              const GenerateConfig& config, const TokenCallback& on_token = {});

// A prompt run at loops_used, its states kept: generating at any loops >= loops_used skips those iterations of it.
class ResumeHandle;
ResumeHandle* create_resume_handle(Model* model, const int32_t* prompt, size_t prompt_len, int loops_used,
                                   const std::string& cache_mode = "fp16", int cache_window = 0);
void free_resume_handle(ResumeHandle* handle);
uint64_t handle_bytes(const ResumeHandle* handle);
int loops_used(const ResumeHandle* handle);
Generation resume_generate(Model* model, ResumeHandle* handle, int loops, const GenerateConfig& config,
                           const TokenCallback& on_token = {});

// ---- self-speculation: few loops draft, the full loops verify all drafts in one pass that goes on from the drafts'
// states. The tokens are those of generate_stream at verify_loops, at any temperature.
Generation generate_speculative(Model* model, const int32_t* prompt, size_t prompt_len,
                                const SpeculativeConfig& speculative, const GenerateConfig& config,
                                const TokenCallback& on_token = {});
Generation generate_tree_speculative(Model* model, const int32_t* prompt, size_t prompt_len,
                                     const SpeculativeConfig& speculative, const GenerateConfig& config,
                                     const TokenCallback& on_token = {});

// (prompt_len, vocab_size) logits of every position; for tests and scoring.
std::vector<float> logits(Model* model, const int32_t* prompt, size_t prompt_len, int loops,
                          const std::string& cache_mode = "fp16", int cache_window = 0);

// SIMD levels that this machine can run, best first; "portable" is always there.
std::vector<std::string> simd_levels();

}  // namespace tinyloop
