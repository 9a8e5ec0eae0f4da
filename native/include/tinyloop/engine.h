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
    bool qk_norm = false, qk_bias = false, v_bias = false, tied_head = false, add_bos = false;
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
    int max_seq_len = 0;        // positions; 0 = the artifact's
    int threads = 0;            // 0 = TINYLOOP_THREADS, else all cores this process may use
    std::string simd = "auto";  // or "portable", "avx2", "avx512"
    int prefill_chunk = 256;    // the most rows of one forward pass
    std::string device = "cpu";
};

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
    std::string cache_mode = "fp16";
    int cache_window = 0;  // positions; 0 = all
    int beam_size = 1;
    bool ignore_eos = false;
};

struct GenerateStats {
    double prefill_ms = 0, first_token_ms = 0, decode_ms = 0;  // first_token_ms counts from the call
    std::string stop_reason;                                   // "eos", "stop_sequence", "max_tokens", "cancelled"
    int prompt_tokens = 0, generated_tokens = 0, loops = 0;
    uint64_t cache_bytes = 0;
};

// Every sampled token is in `tokens`, the EOS or the stop sequence's tokens included.
struct Generation {
    std::vector<int32_t> tokens;
    GenerateStats stats;
};

class Model;

Model* load_model(const std::string& path, int max_seq_len);
Model* load_model(const std::string& path, const LoadOptions& options);
void free_model(Model* model);

const ArtifactInfo& artifact(const Model* model);
int max_seq_len(const Model* model);
std::string device_level(const Model* model);  // "cpu/avx2"
int threads(const Model* model);
uint64_t step_counter(const Model* model);  // grows while the core works
uint64_t weight_bytes(const Model* model);  // memory held by weights and work space
// Bytes that `tokens` positions take at `loops` (0 = default).
uint64_t cache_bytes(const Model* model, int tokens, const std::string& cache_mode, int loops);

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

// (prompt_len, vocab_size) logits of every position; for tests and scoring.
std::vector<float> logits(Model* model, const int32_t* prompt, size_t prompt_len, int loops);

// SIMD levels that this machine can run, best first; "portable" is always there.
std::vector<std::string> simd_levels();

}  // namespace tinyloop
