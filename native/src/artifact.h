// The `.tinyloop` file: safetensors layout, mapped read-only, every field validated before anything is allocated.
// It knows names, shapes and ranges; it does not know how a backend computes.
#pragma once
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>

#include "json.h"
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

// A tensor that a config requires (native/FORMAT.md): a vector, or a matrix (outputs, inputs), which may be stored in
// panels.
struct ExpectedTensor {
    std::string name;
    std::vector<int64_t> shape;
    std::vector<int64_t> panels;            // the shape in panels; empty where the tensor has no such form
    int output_heads = 0, input_heads = 0;  // the head_dim of the axis that is made of heads
};

// In the order globals, prelude, core, coda.
std::vector<ExpectedTensor> expected_tensors(const ModelConfig& config);

ModelConfig parse_config(std::string_view text);

class Artifact {
  public:
    explicit Artifact(const std::string& path);

    const ArtifactInfo& info() const { return info_; }
    // View into the mapped file; data is null when the model has no tensor of that name.
    tl_tensor tensor(const std::string& name) const;
    // What keeps the tensors in panels alive, for a backend that uses those in place that are integers or of type
    // `weights`, or all of them for TL_AS_STORED; null when there are none.
    std::shared_ptr<const MappedFile> panel_memory(int weights) const;

  private:
    size_t read_header();  // returns where the data begins
    void read_metadata(const Json& header);
    // artifact_tensors.cpp
    void read_tensors(const Json& header, size_t data_begin);
    void read_tensor(const ExpectedTensor& want, const Json& entry, size_t data_begin);
    void check_span(size_t data_begin) const;
    void check_joined() const;

    std::shared_ptr<const MappedFile> file_;
    ArtifactInfo info_;
    std::unordered_map<std::string, tl_tensor> views_;
};

}  // namespace tinyloop
