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
constexpr char kDataHash[] = "data_sha256";

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
    // What is not in the page cache yet is then read in huge pages, where kernel and file system can: fewer faults and
    // TLB misses in the weights. A hint.
    ::madvise(mapped, size_, MADV_HUGEPAGE);
    data_ = static_cast<const unsigned char*>(mapped);
}

MappedFile::~MappedFile() {
    if (data_) ::munmap(const_cast<unsigned char*>(data_), size_);
}

Artifact::Artifact(const std::string& path) : file_(std::make_shared<const MappedFile>(path)) {
    info_.file_bytes = file_->size();
    const size_t data_begin = read_header();
    // A header that holds the hash of the data stands for the whole file; the data need not be read.
    const bool hashed = std::any_of(info_.metadata.begin(), info_.metadata.end(),
                                    [](const auto& entry) { return entry.first == kDataHash; });
    info_.fingerprint = hash_bytes(file_->data(), hashed ? data_begin : file_->size());
}

size_t Artifact::read_header() {
    uint64_t header_bytes = 0;
    for (int i = 7; i >= 0; --i) header_bytes = header_bytes << 8 | file_->data()[i];
    const uint64_t room = std::min<uint64_t>(kMaxHeader, file_->size() - 8);
    if (header_bytes < 2 || header_bytes > room)
        bad("header length", std::to_string(header_bytes), "2 to " + std::to_string(room) + ", as in a .tinyloop file");
    const size_t data_begin = 8 + static_cast<size_t>(header_bytes);
    const Json header = parse_json({reinterpret_cast<const char*>(file_->data()) + 8, data_begin - 8}, "header");
    if (header.kind != Json::Kind::object) bad("header", "not an object", "a JSON object");
    read_metadata(header);
    read_tensors(header, data_begin);
    return data_begin;
}

void Artifact::read_metadata(const Json& header) {
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
    if (const Json* hash = metadata->find(kDataHash))
        if (hash->string.size() != 64 || hash->string.find_first_not_of("0123456789abcdef") != std::string::npos)
            bad(std::string("__metadata__.") + kDataHash, hash->string.substr(0, 70), "64 hexadecimal digits");
    info_.config = parse_config(required("config"));
}

tl_tensor Artifact::tensor(const std::string& name) const {
    auto found = views_.find(name);
    return found == views_.end() ? tl_tensor{} : found->second;
}

std::shared_ptr<const MappedFile> Artifact::panel_memory(int weights) const {
    const bool used = std::any_of(views_.begin(), views_.end(), [&](const auto& view) {
        const tl_tensor& tensor = view.second;
        const bool integers = tensor.dtype == TL_INT8 || tensor.dtype == TL_INT4;
        return tensor.layout == TL_PANELS && (integers || weights == TL_AS_STORED || weights == tensor.dtype);
    });
    return used ? file_ : nullptr;
}

ArtifactInfo inspect_artifact(const std::string& path) { return Artifact(path).info(); }

}  // namespace tinyloop
