// The defaults of a request that the environment may set; a field that is given always wins.
#include <charconv>
#include <cstdlib>
#include <cstring>

#include "modes.h"
#include "tinyloop/engine.h"

namespace tinyloop {
namespace {

const char* variable(const char* name) {
    const char* value = std::getenv(name);
    return value && *value ? value : nullptr;
}

}  // namespace

std::string default_cache_mode() {
    const char* value = variable("TINYLOOP_CACHE_MODE");
    if (!value) return "fp16";
    if (cache_mode_of(value) < 0) refuse(ErrorKind::config, "TINYLOOP_CACHE_MODE", value, cache_mode_names());
    return value;
}

double default_exit_threshold() {
    const char* value = variable("TINYLOOP_EARLY_EXIT");
    if (!value) return 0;
    double threshold = -1;
    const char* end = value + std::strlen(value);
    const auto parsed = std::from_chars(value, end, threshold);
    if (parsed.ec != std::errc() || parsed.ptr != end || !(threshold >= 0 && threshold <= 1))
        refuse(ErrorKind::config, "TINYLOOP_EARLY_EXIT", value, "0 (off) to 1");
    return threshold;
}

bool default_speculative() {
    const char* value = variable("TINYLOOP_SPECULATIVE");
    if (!value) return false;
    if (std::strcmp(value, "0") != 0 && std::strcmp(value, "1") != 0)
        refuse(ErrorKind::config, "TINYLOOP_SPECULATIVE", value, "0 or 1");
    return *value == '1';
}

}  // namespace tinyloop
