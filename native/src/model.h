// A loaded model: the artifact, the backend that holds its weights, and the guard against overlapping calls.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "artifact.h"
#include "tinyloop/backend.h"
#include "tinyloop/engine.h"

namespace tinyloop {

// Throws the Error that `result` and `status` stand for, unless it is TL_OK.
void check(int result, const tl_status& status, const std::string& doing);

class Cache {
  public:
    Cache(const tl_backend& backend, tl_model* model, const tl_cache_desc& shape);
    tl_cache* get() const { return cache_.get(); }
    uint64_t bytes() const { return bytes_; }

  private:
    std::unique_ptr<tl_cache, void (*)(tl_cache*)> cache_;
    uint64_t bytes_;
};

class States {
  public:
    States(const tl_backend& backend, tl_model* model, int count);
    tl_states* get() const { return states_.get(); }

  private:
    std::unique_ptr<tl_states, void (*)(tl_states*)> states_;
};

class Model {
  public:
    Model(const std::string& path, const LoadOptions& options);

    const ArtifactInfo& info() const { return info_; }
    const ModelConfig& config() const { return info_.config; }
    const LoadOptions& options() const { return options_; }  // with every default resolved
    const tl_backend& backend() const { return backend_; }
    tl_model* handle() const { return handle_.get(); }

    Cache make_cache(int positions, int loops) const;
    States make_states(int count) const { return States(backend_, handle(), count); }

    // One pass over the rows (backend.h), split where there are more than prefill_chunk. A split never separates rows
    // in a way that breaks the order rule, because it keeps their order.
    void forward(const std::vector<tl_cache*>& caches, tl_states* states, const std::vector<tl_row>& rows,
                 float* logits) const;

    // Held during every call that computes; throws ErrorKind::busy when another call is on.
    class Call {
      public:
        explicit Call(Model& model);
        ~Call();
        Call(const Call&) = delete;
        Call& operator=(const Call&) = delete;

      private:
        Model& model_;
    };

  private:
    ArtifactInfo info_;
    LoadOptions options_;
    const tl_backend& backend_;
    std::unique_ptr<tl_model, void (*)(tl_model*)> handle_;
    std::atomic<bool> busy_{false};
};

}  // namespace tinyloop
