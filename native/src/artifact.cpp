#include "artifact.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <set>

#include "json.h"

namespace tinyloop {
namespace {

constexpr uint64_t kMaxHeader = 64u << 20;

[[noreturn]] void bad(const std::string& field, const std::string& value, const std::string& accepted) {
    refuse(ErrorKind::artifact, field, value, accepted);
}

// ---------------------------------------------------------------- config

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

// ---------------------------------------------------------------- fingerprint

uint64_t mix(uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * 0x9E3779B97F4A7C15ull;
    return hash ^ (hash >> 29);
}

// Four interleaved multiplicative lanes over 8-byte words, folded to 128 bits; reads at memory speed.
std::string hash_bytes(const unsigned char* data, size_t size) {
    uint64_t lanes[4] = {0x243F6A8885A308D3ull, 0x13198A2E03707344ull, 0xA4093822299F31D0ull, 0x082EFA98EC4E6C89ull};
    size_t at = 0;
    for (; at + 32 <= size; at += 32)
        for (int lane = 0; lane < 4; ++lane) {
            uint64_t word;
            std::memcpy(&word, data + at + 8 * lane, 8);
            lanes[lane] = mix(lanes[lane], word);
        }
    for (; at < size; ++at) lanes[0] = mix(lanes[0], data[at]);
    uint64_t high = size, low = ~static_cast<uint64_t>(size);
    for (uint64_t lane : lanes) {
        high = mix(high, lane);
        low = mix(mix(low, lane), high);
    }
    char text[33];
    std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(high),
                  static_cast<unsigned long long>(low));
    return text;
}

struct DtypeName {
    const char* name;
    int dtype;
    uint64_t bytes;
};
constexpr DtypeName kDtypes[] = {{"F32", TL_F32, 4}, {"F16", TL_F16, 2}, {"BF16", TL_BF16, 2}};

const DtypeName& dtype_of(const std::string& field, const Json* value) {
    for (const DtypeName& known : kDtypes)
        if (value && value->kind == Json::Kind::string && value->string == known.name) return known;
    bad(field + ".dtype", value ? value->string.substr(0, 20) : "missing", "F32, F16 or BF16");
}

std::string shape_text(const std::vector<int64_t>& shape) {
    std::string text = "[";
    for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
    return text + "]";
}

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

std::vector<std::pair<std::string, std::vector<int64_t>>> expected_tensors(const ModelConfig& c) {
    std::vector<std::pair<std::string, std::vector<int64_t>>> out;
    const int64_t d = c.d_model, q = int64_t(c.n_heads) * c.head_dim, kv = int64_t(c.n_kv_heads) * c.head_dim,
                  f = c.d_ffn;
    out.push_back({"embed.weight", {c.vocab_size, d}});
    if (!c.tied_head) out.push_back({"head.weight", {c.vocab_size, d}});
    if (c.final_norm) out.push_back({"final_norm.weight", {d}});
    if (c.loop_norm) out.push_back({"loop_norm.weight", {d}});
    if (c.core_norm) out.push_back({"core_norm.weight", {d}});
    if (c.injection == TL_INJECT_CONCAT) out.push_back({"inject.weight", {d, 2 * d}});
    if (c.exit_gate) out.push_back({"exit_gate.weight", {1, d}});
    if (c.exit_gate) out.push_back({"exit_gate.bias", {1}});
    const bool before = c.norm != TL_NORM_POST, after = c.norm != TL_NORM_PRE;
    const std::pair<const char*, int> parts[] = {{"prelude", c.n_prelude}, {"core", c.n_core}, {"coda", c.n_coda}};
    for (auto [part, count] : parts)
        for (int i = 0; i < count; ++i) {
            const std::string p = std::string(part) + "." + std::to_string(i) + ".";
            if (before) out.push_back({p + "attn_norm.weight", {d}});
            if (after) out.push_back({p + "attn_post_norm.weight", {d}});
            if (before) out.push_back({p + "ffn_norm.weight", {d}});
            if (after) out.push_back({p + "ffn_post_norm.weight", {d}});
            out.push_back({p + "wq.weight", {q, d}});
            out.push_back({p + "wk.weight", {kv, d}});
            out.push_back({p + "wv.weight", {kv, d}});
            out.push_back({p + "wo.weight", {d, q}});
            if (c.qk_bias) out.push_back({p + "q_bias", {q}});
            if (c.qk_bias) out.push_back({p + "k_bias", {kv}});
            if (c.v_bias) out.push_back({p + "v_bias", {kv}});
            if (c.qk_norm) out.push_back({p + "q_norm.weight", {c.head_dim}});
            if (c.qk_norm) out.push_back({p + "k_norm.weight", {c.head_dim}});
            out.push_back({p + "w_gate.weight", {f, d}});
            out.push_back({p + "w_up.weight", {f, d}});
            out.push_back({p + "w_down.weight", {d, f}});
        }
    return out;
}

MappedFile::MappedFile(const std::string& path) {
    int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) bad("path", path, std::string("a readable file (") + std::strerror(errno) + ")");
    struct stat status{};
    if (::fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) {
        ::close(fd);
        bad("path", path, "a regular file");
    }
    size_ = static_cast<size_t>(status.st_size);
    if (size_ < 8) {
        ::close(fd);
        bad("file size", std::to_string(size_), "at least the 8 bytes of the header length");
    }
    void* mapped = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, fd, 0);
    ::close(fd);
    if (mapped == MAP_FAILED)
        bad("path", path, std::string("a file that can be mapped (") + std::strerror(errno) + ")");
    data_ = static_cast<const unsigned char*>(mapped);
}

MappedFile::~MappedFile() {
    if (data_) ::munmap(const_cast<unsigned char*>(data_), size_);
}

Artifact::Artifact(const std::string& path) : file_(path) {
    info_.file_bytes = file_.size();
    read_header();
    info_.fingerprint = hash_bytes(file_.data(), file_.size());
}

void Artifact::read_header() {
    uint64_t header_bytes = 0;
    for (int i = 7; i >= 0; --i) header_bytes = header_bytes << 8 | file_.data()[i];
    const uint64_t room = std::min<uint64_t>(kMaxHeader, file_.size() - 8);
    if (header_bytes < 2 || header_bytes > room)
        bad("header length", std::to_string(header_bytes), "2 to " + std::to_string(room));
    read_tensors({reinterpret_cast<const char*>(file_.data()) + 8, static_cast<size_t>(header_bytes)},
                 8 + static_cast<size_t>(header_bytes));
}

void Artifact::read_tensors(std::string_view header_text, size_t data_begin) {
    const Json header = parse_json(header_text, "header");
    if (header.kind != Json::Kind::object) bad("header", "not an object", "a JSON object");
    const Json* metadata = header.find("__metadata__");
    if (!metadata || metadata->kind != Json::Kind::object) bad("__metadata__", "missing", "an object of strings");
    for (const auto& [key, value] : metadata->members) {
        if (value.kind != Json::Kind::string) bad("__metadata__." + key.substr(0, 60), "not a string", "a string");
        info_.metadata.emplace_back(key, value.string);
    }
    auto required = [&](const char* key) -> const std::string& {
        const Json* value = metadata->find(key);
        if (!value) bad(std::string("__metadata__.") + key, "missing", "this key");
        return value->string;
    };
    if (required("format") != "tinyloop") bad("__metadata__.format", required("format").substr(0, 60), "\"tinyloop\"");
    if (required("format_version") != "1")
        bad("__metadata__.format_version", required("format_version").substr(0, 60), "\"1\"");
    info_.config = parse_config(required("config"));

    std::unordered_map<std::string, std::vector<int64_t>> wanted;
    for (auto& [name, shape] : expected_tensors(info_.config)) wanted.emplace(name, shape);

    struct Span {
        uint64_t begin, end;
        std::string name;
    };
    std::vector<Span> spans;
    const uint64_t data_bytes = file_.size() - data_begin;
    for (const auto& [name, entry] : header.members) {
        if (name == "__metadata__") continue;
        const std::string field = "tensor " + name.substr(0, 60);
        auto want = wanted.find(name);
        if (want == wanted.end()) bad(field, "present", "only the tensors that the config asks for");
        for (const auto& [key, value] : entry.members)
            if (key != "dtype" && key != "shape" && key != "data_offsets")
                bad(field + "." + key.substr(0, 60), "present", "dtype, shape, data_offsets");
        const DtypeName& dtype = dtype_of(field, entry.find("dtype"));

        const Json* shape_json = entry.find("shape");
        std::vector<int64_t> shape;
        if (shape_json)
            for (const Json& item : shape_json->items) shape.push_back(item.is_integer ? item.integer : -1);
        if (shape != want->second)
            bad(field + ".shape", shape_json ? shape_text(shape) : "missing", shape_text(want->second));
        uint64_t count = 1;  // no overflow: every expected dimension is bounded by parse_config
        for (int64_t size : shape) count *= static_cast<uint64_t>(size);

        const Json* offsets = entry.find("data_offsets");
        if (!offsets || offsets->items.size() != 2 || !offsets->items[0].is_integer || !offsets->items[1].is_integer)
            bad(field + ".data_offsets", "malformed", "two integers");
        const int64_t begin = offsets->items[0].integer, end = offsets->items[1].integer;
        if (begin < 0 || end < begin || static_cast<uint64_t>(end) > data_bytes)
            bad(field + ".data_offsets", shape_text({begin, end}),
                "offsets within the file's " + std::to_string(data_bytes) + " data bytes");
        if (static_cast<uint64_t>(end - begin) != count * dtype.bytes)
            bad(field + ".data_offsets", shape_text({begin, end}), std::to_string(count * dtype.bytes) + " bytes");

        const unsigned char* data = file_.data() + data_begin + begin;
        if (reinterpret_cast<uintptr_t>(data) % dtype.bytes)
            bad(field + ".data_offsets", shape_text({begin, end}), "aligned to the element size");
        spans.push_back({static_cast<uint64_t>(begin), static_cast<uint64_t>(end), name});
        info_.tensors.push_back({name, dtype.dtype, shape, static_cast<uint64_t>(end - begin)});
        info_.parameters += count;
        views_[name] = {data, dtype.dtype, static_cast<int32_t>(shape[0]),
                        shape.size() > 1 ? static_cast<int32_t>(shape[1]) : 1};
        wanted.erase(want);
    }
    if (!wanted.empty()) {
        std::string first = wanted.begin()->first;  // the smallest name, so that the message does not depend on hashing
        for (const auto& [name, shape] : wanted) first = std::min(first, name);
        bad("tensor " + first, "missing", "this tensor, and " + std::to_string(wanted.size() - 1) + " more");
    }
    std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
    uint64_t at = 0;
    for (const Span& span : spans) {
        if (span.begin != at)
            bad("tensor " + span.name.substr(0, 60) + ".data_offsets", std::to_string(span.begin),
                std::to_string(at) + ": no holes, no overlap");
        at = span.end;
    }
    if (at != data_bytes)
        bad("file size", std::to_string(file_.size()),
            std::to_string(data_begin + at) + ": no bytes after the last tensor");
}

tl_tensor Artifact::tensor(const std::string& name) const {
    auto found = views_.find(name);
    return found == views_.end() ? tl_tensor{nullptr, 0, 0, 0} : found->second;
}

ArtifactInfo inspect_artifact(const std::string& path) { return Artifact(path).info(); }

}  // namespace tinyloop
