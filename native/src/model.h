// A loaded model: the artifact, the backend that holds its weights, and the guard against overlapping calls.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "artifact.h"
#include "backends.h"
#include "logit_rows.h"
#include "tinyloop/backend.h"
#include "tinyloop/engine.h"

namespace tinyloop {

// Throws the Error that `result` and `status` stand for, unless it is TL_OK.
void check(int result, const tl_status& status, const std::string& doing);

class Cache {
  public:
    Cache(const tl_backend& backend, tl_model* model, const tl_cache_desc& shape);
    tl_cache* get() const { return cache_.get(); }
    const tl_cache_desc& shape() const { return shape_; }
    uint64_t bytes() const { return bytes_; }
    // Takes slots 0 .. slots-1 of the prelude, the coda and the first `loops` iterations from a cache of the same mode.
    void copy_from(const Cache& other, int slots, int loops);
    void move(int to_slot, int from_slot);

  private:
    const tl_backend* backend_;
    tl_model* model_;
    tl_cache_desc shape_;
    std::unique_ptr<tl_cache, void (*)(tl_cache*)> cache_;
    uint64_t bytes_;
};

class States {
  public:
    States(const tl_backend& backend, tl_model* model, int count);
    tl_states* get() const { return states_.get(); }
    uint64_t bytes() const { return bytes_; }

  private:
    uint64_t bytes_;
    std::unique_ptr<tl_states, void (*)(tl_states*)> states_;
};

class Model {
  public:
    Model(const std::string& path, const LoadOptions& options);

    const ArtifactInfo& info() const { return info_; }
    const ModelConfig& config() const { return info_.config; }
    const LoadOptions& options() const { return options_; }  // with every default resolved
    const std::vector<int>& cpus() const { return cpus_; }   // (threads) of the affinity; empty: none
    const Device& device() const { return device_; }
    const tl_backend& backend() const { return *device_.backend; }
    tl_model* handle() const { return handle_.get(); }

    Cache make_cache(int positions, int loops, int mode = TL_CACHE_FP16, int window = 0) const;
    States make_states(int count) const { return States(backend(), handle(), count); }

    // One pass over the rows (backend.h), split where there are more than prefill_chunk. A split never separates rows
    // in a way that breaks the order rule, because it keeps their order. logits: as LogitRows lays them out.
    void forward(const std::vector<tl_cache*>& caches, tl_states* states, const std::vector<tl_row>& rows,
                 RowLogits logits, int32_t* loops_run = nullptr) const;

    // The loops of a request, its default resolved; throws ErrorKind::limit.
    int loops_of(int asked) const;

  private:
    friend class Call;

    ArtifactInfo info_;
    LoadOptions options_;
    std::vector<int> cpus_;
    Device device_;
    std::shared_ptr<const MappedFile> weights_in_place_;  // outlives handle_; null when the backend copied all
    std::unique_ptr<tl_model, void (*)(tl_model*)> handle_;
    std::atomic<bool> busy_{false};
};

// Held during every call that computes, on the model and on the handle it uses; throws ErrorKind::busy when another
// call is on and ErrorKind::mode when the handle was built with another model.
class Call {
  public:
    explicit Call(Model& model);
    template <class Handle>
    Call(Model& model, Handle& handle, const char* kind) : Call(model) {
        claim(handle.busy, handle.model, kind);
    }
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

  private:
    void claim(std::atomic<bool>& busy, const Model* owner, const char* kind);

    Model& model_;
    std::atomic<bool>* handle_ = nullptr;
};

}  // namespace tinyloop
