// The `.tinyloop` file: safetensors layout, mapped read-only, every field validated before anything is allocated.
// It knows names, shapes and ranges; it does not know how a backend stores or computes.
#pragma once
#include <cstddef>
#include <string>
#include <string_view>
#include <unordered_map>

#include "tinyloop/backend.h"
#include "tinyloop/engine.h"

namespace tinyloop {

class MappedFile {
  public:
    explicit MappedFile(const std::string& path);
    ~MappedFile();
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    const unsigned char* data() const { return data_; }
    size_t size() const { return size_; }

  private:
    const unsigned char* data_ = nullptr;
    size_t size_ = 0;
};

// The names and shapes that a config requires, in the order prelude, core, coda (native/FORMAT.md).
std::vector<std::pair<std::string, std::vector<int64_t>>> expected_tensors(const ModelConfig& config);

ModelConfig parse_config(std::string_view text);

class Artifact {
  public:
    explicit Artifact(const std::string& path);

    const ArtifactInfo& info() const { return info_; }
    // Rows x cols view into the mapped file; data is null when the model has no tensor of that name.
    tl_tensor tensor(const std::string& name) const;

  private:
    void read_header();
    void read_tensors(std::string_view header, size_t data_begin);

    MappedFile file_;
    ArtifactInfo info_;
    std::unordered_map<std::string, tl_tensor> views_;
};

}  // namespace tinyloop
