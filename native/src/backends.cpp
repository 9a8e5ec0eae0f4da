#include "backends.h"

#include <dlfcn.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <vector>

#include "tinyloop/engine.h"

namespace tinyloop {
namespace {

namespace fs = std::filesystem;

constexpr char kPrefix[] = "libtinyloop_", kSuffix[] = ".so";
constexpr int kMostDevices = 1024;

[[noreturn]] void unavailable(const std::string& name, const std::string& reason) {
    throw Error(ErrorKind::unavailable, "device", name, "cpu, or a device of tinyloop_serve.native.devices()",
                "device: " + name + " is not available: " + reason);
}

struct Name {
    std::string kind;
    int ordinal = 0;
};

// "cuda" or "cuda:N". Letters, digits and "_" only: the kind becomes a part of a file's name.
Name parse(const std::string& name) {
    const size_t colon = name.find(':');
    Name parsed{name.substr(0, colon), 0};
    bool good = !parsed.kind.empty() && parsed.kind.size() <= 32 &&
                std::all_of(parsed.kind.begin(), parsed.kind.end(),
                            [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_'; });
    if (colon != std::string::npos) {
        const char *begin = name.data() + colon + 1, *end = name.data() + name.size();
        const auto [stop, error] = std::from_chars(begin, end, parsed.ordinal);
        good = good && error == std::errc() && stop == end && parsed.ordinal < kMostDevices &&
               (*begin != '0' || end - begin == 1) && *begin != '-';
    }
    if (!good) refuse(ErrorKind::config, "device", name, "cpu, cuda or cuda:N");
    return parsed;
}

std::vector<fs::path> folders() {
    std::vector<fs::path> found;
    if (const char* variable = std::getenv("TINYLOOP_BACKEND_PATH")) {
        std::string rest = variable;
        for (size_t colon; !rest.empty(); rest = colon == std::string::npos ? "" : rest.substr(colon + 1)) {
            colon = rest.find(':');
            if (colon != 0) found.emplace_back(rest.substr(0, colon));
        }
    }
    Dl_info self{};
    if (dladdr(reinterpret_cast<const void*>(&tl_cpu_backend), &self) && self.dli_fname)
        found.push_back(fs::absolute(self.dli_fname).parent_path());
    return found;
}

// The plug-in's table, or null with the reason.
const tl_backend* load(const std::string& kind, std::string& reason) {
    const std::string file = kPrefix + kind + kSuffix;
    fs::path path;
    std::string looked;
    for (const fs::path& folder : folders()) {
        std::error_code ignored;
        if (fs::exists(folder / file, ignored)) {
            path = folder / file;
            break;
        }
        looked += (looked.empty() ? "" : ", ") + folder.string();
    }
    if (path.empty()) {
        reason = "this build has no " + file + " (looked in " + looked + ")";
        return nullptr;
    }
    void* library = dlopen(fs::absolute(path).c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        reason = dlerror();
        return nullptr;
    }
    const auto entry = reinterpret_cast<tl_backend_entry>(dlsym(library, "tinyloop_backend"));
    const tl_backend* backend = entry ? entry() : nullptr;
    if (!entry) {
        reason = path.string() + " has no tinyloop_backend";
    } else if (!backend) {
        reason = path.string() + " gave no backend";
    } else if (backend->abi != TL_BACKEND_ABI || backend->size != sizeof(tl_backend)) {
        reason = path.string() + " was built for version " + std::to_string(backend->abi) +
                 " of the backend interface (" + std::to_string(backend->size) + " bytes), this engine for version " +
                 std::to_string(TL_BACKEND_ABI) + " (" + std::to_string(sizeof(tl_backend)) + " bytes)";
        backend = nullptr;
    }
    if (!backend) dlclose(library);
    return backend;
}

// The kinds of device that there is something to say about: CUDA always.
std::set<std::string> plug_ins() {
    std::set<std::string> kinds{"cuda"};
    const std::string prefix = kPrefix, suffix = kSuffix;
    for (const fs::path& folder : folders()) {
        std::error_code ignored;
        for (const fs::directory_entry& entry : fs::directory_iterator(folder, ignored)) {
            const std::string file = entry.path().filename().string();
            if (file.size() > prefix.size() + suffix.size() && file.starts_with(prefix) && file.ends_with(suffix))
                kinds.insert(file.substr(prefix.size(), file.size() - prefix.size() - suffix.size()));
        }
    }
    return kinds;
}

std::string full_name(const tl_backend& backend, const std::string& kind, int ordinal) {
    return &backend == tl_cpu_backend() ? kind : kind + ":" + std::to_string(ordinal);
}

void append_devices(const std::string& kind, const tl_backend& backend, std::vector<DeviceFacts>& found) {
    tl_status status{};
    const int count = backend.device_count(&status);
    if (count < 1) found.push_back({kind, "", status.message});
    for (int i = 0; i < count; ++i) {
        tl_device_info info{};
        const bool good = backend.device_info(i, &info, &status) == TL_OK;
        found.push_back({full_name(backend, kind, i), info.name, good ? "" : status.message, info.total_bytes});
    }
}

}  // namespace

Device open_device(const std::string& name) {
    const Name asked = parse(name);
    std::string reason;
    const tl_backend* backend = asked.kind == "cpu" ? tl_cpu_backend() : load(asked.kind, reason);
    if (!backend) unavailable(name, reason);
    tl_status status{};
    const int count = backend->device_count(&status);
    if (count < 1) unavailable(name, status.message);
    if (asked.ordinal >= count)
        unavailable(name, "there " +
                              std::string(count == 1 ? "is 1 device" : "are " + std::to_string(count) + " devices") +
                              ", counted from 0");
    return {backend, asked.ordinal, full_name(*backend, asked.kind, asked.ordinal)};
}

std::vector<DeviceFacts> devices() {
    std::vector<DeviceFacts> found;
    append_devices("cpu", *tl_cpu_backend(), found);
    for (const std::string& kind : plug_ins()) {
        std::string reason;
        if (const tl_backend* backend = load(kind, reason))
            append_devices(kind, *backend, found);
        else
            found.push_back({kind, "", reason});
    }
    return found;
}

}  // namespace tinyloop
