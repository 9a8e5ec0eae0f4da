#include "artifact.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "json.h"

namespace tinyloop {
namespace {

constexpr uint64_t kMaxHeader = 64u << 20;

[[noreturn]] void bad(const std::string& field, const std::string& value, const std::string& accepted) {
    refuse(ErrorKind::artifact, field, value, accepted);
}

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
