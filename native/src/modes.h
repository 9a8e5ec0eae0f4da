// The mode matrix (SPEC 2.4), read from protocol/modes.json, which the dispatcher, the documents and the tests read
// too.
#pragma once
#include <string>

namespace tinyloop {

// The ways to generate: the matrix's columns, in the file's words.
inline constexpr const char* kSingle = "single";
inline constexpr const char* kBatch = "batch";
inline constexpr const char* kSpeculative = "speculative";
inline constexpr const char* kTreeSpeculative = "tree_speculative";
inline constexpr const char* kPrefix = "prefix";
inline constexpr const char* kResume = "resume";

bool mode_supported(const std::string& row, const std::string& column);

// tl_cache_mode of a cache mode's name, or -1.
int cache_mode_of(const std::string& name);
std::string cache_mode_names();  // "fp16, int8, ..."

}  // namespace tinyloop
