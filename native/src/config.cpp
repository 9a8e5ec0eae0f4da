// The rules of an artifact's config: every key's range, and the tensors that a config asks for (native/FORMAT.md).
#include <cstdio>
#include <set>

#include "artifact.h"
#include "json.h"

namespace tinyloop {
namespace {

[[noreturn]] void bad(const std::string& field, const std::string& value, const std::string& accepted) {
    refuse(ErrorKind::artifact, field, value, accepted);
}

class ConfigReader {
  public:
    explicit ConfigReader(const Json& object) : object_(object) {
        if (object.kind != Json::Kind::object) bad("config", "not an object", "a JSON object");
    }

    int integer(const char* key, int64_t low, int64_t high, const int* fallback = nullptr) {
        const Json* value = take(key, fallback != nullptr);
        if (!value) return *fallback;
        std::string accepted = "an integer from " + std::to_string(low) + " to " + std::to_string(high);
        if (!value->is_integer) bad(field(key), shown(*value), accepted);
        if (value->integer < low || value->integer > high) bad(field(key), shown(*value), accepted);
        return static_cast<int>(value->integer);
    }

    double real(const char* key, double low, double high, const double* fallback = nullptr) {
        const Json* value = take(key, fallback != nullptr);
        if (!value) return *fallback;
        if (value->kind != Json::Kind::number || !(value->number >= low && value->number <= high))
            bad(field(key), shown(*value), "a number from " + short_number(low) + " to " + short_number(high));
        return value->number;
    }

    bool flag(const char* key, const bool* fallback = nullptr) {
        const Json* value = take(key, fallback != nullptr);
        if (!value) return *fallback;
        if (value->kind != Json::Kind::boolean) bad(field(key), shown(*value), "true or false");
        return value->boolean;
    }

    int choice(const char* key, std::initializer_list<const char*> names) {
        const Json* value = take(key, false);
        std::string accepted = "one of";
        int index = 0;
        for (const char* name : names) {
            if (value->kind == Json::Kind::string && value->string == name) return index;
            accepted += std::string(index ? ", " : " ") + name;
            ++index;
        }
        bad(field(key), shown(*value), accepted);
    }

    int token(const char* key, int vocab_size) {
        const Json* value = take(key, false);
        if (value->kind == Json::Kind::null) return -1;
        return token_value(field(key), *value, vocab_size);
    }

    std::vector<int> tokens(const char* key, int vocab_size) {
        const Json* value = take(key, false);
        if (value->kind != Json::Kind::array) bad(field(key), shown(*value), "a list of token ids");
        std::vector<int> ids;
        for (size_t i = 0; i < value->items.size(); ++i)
            ids.push_back(token_value(field(key) + "[" + std::to_string(i) + "]", value->items[i], vocab_size));
        return ids;
    }

    void number_or_null(const char* key) {
        const Json* value = take(key, false);
        if (value->kind != Json::Kind::null && !(value->kind == Json::Kind::number && value->number >= 0))
            bad(field(key), shown(*value), "a number, 0 or more, or null");
    }

    void finish() {
        for (const auto& [name, value] : object_.members)
            if (!taken_.count(name)) bad(field(name.substr(0, 60)), shown(value), "no such key");
    }

  private:
    static std::string field(const std::string& key) { return "config." + key; }

    static std::string short_number(double value) {
        char text[32];
        std::snprintf(text, sizeof text, "%g", value);
        return text;
    }

    static std::string shown(const Json& value) {
        switch (value.kind) {
            case Json::Kind::null:
                return "null";
            case Json::Kind::boolean:
                return value.boolean ? "true" : "false";
            case Json::Kind::number:
                return value.is_integer ? std::to_string(value.integer) : short_number(value.number);
            case Json::Kind::string:
                return "\"" + value.string.substr(0, 60) + "\"";
            case Json::Kind::array:
                return "a list";
            default:
                return "an object";
        }
    }

    static int token_value(const std::string& name, const Json& value, int vocab_size) {
        if (!value.is_integer || value.integer < 0 || value.integer >= vocab_size)
            bad(name, shown(value), "a token id from 0 to " + std::to_string(vocab_size - 1));
        return static_cast<int>(value.integer);
    }

    const Json* take(const char* key, bool optional) {
        taken_.insert(key);
        const Json* value = object_.find(key);
        if (!value && !optional) bad(field(key), "missing", "this key in the config");
        return value;
    }

    const Json& object_;
    std::set<std::string> taken_;
};

}  // namespace

ModelConfig parse_config(std::string_view text) {
    Json json = parse_json(text, "config");
    ConfigReader in(json);
    const bool no = false, yes = true;
    const double one = 1.0;
    ModelConfig c;
    c.vocab_size = in.integer("vocab_size", 1, 1 << 24);
    c.d_model = in.integer("d_model", 1, 1 << 16);
    c.n_heads = in.integer("n_heads", 1, 1024);
    c.n_kv_heads = in.integer("n_kv_heads", 1, 1024);
    if (c.n_heads % c.n_kv_heads)
        bad("config.n_kv_heads", std::to_string(c.n_kv_heads), "a divisor of n_heads = " + std::to_string(c.n_heads));
    c.head_dim = in.integer("head_dim", 2, 1024);
    if (c.head_dim % 2) bad("config.head_dim", std::to_string(c.head_dim), "an even number");
    c.d_ffn = in.integer("d_ffn", 1, 1 << 18);
    c.n_prelude = in.integer("n_prelude", 0, 1024);
    c.n_core = in.integer("n_core", 1, 1024);
    c.n_coda = in.integer("n_coda", 0, 1024);
    c.loops = in.integer("loops", 1, 1024);
    c.max_loops = in.integer("max_loops", c.loops, 1024, &c.loops);
    c.max_seq_len = in.integer("max_seq_len", 1, 1 << 24);
    c.norm = in.choice("norm", {"pre", "sandwich", "post", "pre_post"});
    c.norm_eps = in.real("norm_eps", 0, 1);
    c.injection = in.choice("injection", {"none", "add", "concat"});
    c.start = in.choice("start", {"prelude", "zeros"});
    c.loop_norm = in.flag("loop_norm", &no);
    c.core_norm = in.flag("core_norm", &no);
    c.final_norm = in.flag("final_norm", &yes);
    c.rope = in.choice("rope", {"half", "interleaved"});
    c.rope_theta = in.real("rope_theta", 1, 1e12);
    c.qk_norm = in.flag("qk_norm", &no);
    c.qk_bias = in.flag("qk_bias", &no);
    c.v_bias = in.flag("v_bias", &no);
    c.exit_gate = in.flag("exit_gate", &no);
    c.tied_head = in.flag("tied_head");
    c.embed_scale = in.real("embed_scale", -1e6, 1e6, &one);
    c.logit_scale = in.real("logit_scale", -1e6, 1e6, &one);
    c.bos_id = in.token("bos_id", c.vocab_size);
    c.eos_ids = in.tokens("eos_ids", c.vocab_size);
    c.add_bos = in.flag("add_bos", &no);
    if (c.add_bos && c.bos_id < 0) bad("config.add_bos", "true", "false when bos_id is null");
    in.number_or_null("beta");
    in.finish();
    return c;
}

std::vector<ExpectedTensor> expected_tensors(const ModelConfig& c) {
    std::vector<ExpectedTensor> out;
    const int64_t d = c.d_model, q = int64_t(c.n_heads) * c.head_dim, kv = int64_t(c.n_kv_heads) * c.head_dim,
                  f = c.d_ffn;
    const int hd = c.head_dim;
    auto vector = [&](const std::string& name, int64_t size) { out.push_back({name, {size}, {}}); };
    auto matrix = [&](const std::string& name, int64_t outputs, int64_t inputs, int output_heads = 0,
                      int input_heads = 0) {
        auto padded = [](int64_t size, int head) {  // nothing follows the last head's own elements
            return head ? (size / head - 1) * ((head + 15) / 16 * 16) + head : size;
        };
        out.push_back({name,
                       {outputs, inputs},
                       {(padded(outputs, output_heads) + 15) / 16, padded(inputs, input_heads), 16},
                       output_heads,
                       input_heads});
    };
    matrix("embed.weight", c.vocab_size, d);
    if (!c.tied_head) matrix("head.weight", c.vocab_size, d);
    if (c.final_norm) vector("final_norm.weight", d);
    if (c.loop_norm) vector("loop_norm.weight", d);
    if (c.core_norm) vector("core_norm.weight", d);
    if (c.injection == TL_INJECT_CONCAT) matrix("inject.weight", d, 2 * d);
    if (c.exit_gate) out.push_back({"exit_gate.weight", {1, d}, {}});
    if (c.exit_gate) vector("exit_gate.bias", 1);
    const bool before = c.norm != TL_NORM_POST, after = c.norm != TL_NORM_PRE;
    const std::pair<const char*, int> parts[] = {{"prelude", c.n_prelude}, {"core", c.n_core}, {"coda", c.n_coda}};
    for (auto [part, count] : parts)
        for (int i = 0; i < count; ++i) {
            const std::string p = std::string(part) + "." + std::to_string(i) + ".";
            if (before) vector(p + "attn_norm.weight", d);
            if (after) vector(p + "attn_post_norm.weight", d);
            if (before) vector(p + "ffn_norm.weight", d);
            if (after) vector(p + "ffn_post_norm.weight", d);
            matrix(p + "wq.weight", q, d, hd);
            matrix(p + "wk.weight", kv, d, hd);
            matrix(p + "wv.weight", kv, d, hd);
            matrix(p + "wo.weight", d, q, 0, hd);
            if (c.qk_bias) vector(p + "q_bias", q);
            if (c.qk_bias) vector(p + "k_bias", kv);
            if (c.v_bias) vector(p + "v_bias", kv);
            if (c.qk_norm) vector(p + "q_norm.weight", hd);
            if (c.qk_norm) vector(p + "k_norm.weight", hd);
            matrix(p + "w_gate.weight", f, d);
            matrix(p + "w_up.weight", f, d);
            matrix(p + "w_down.weight", d, f);
        }
    return out;
}

}  // namespace tinyloop
