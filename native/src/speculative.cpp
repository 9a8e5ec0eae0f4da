// Self-speculation (Leviathan et al., arXiv 2211.17192, with the model's own first loops as the draft). The draft's
// rows keep their states, and the verification goes on from them, so no loop of any row runs twice. A draft is accepted
// exactly when it is the token that plain decoding would have sampled there: the draw depends on (seed, position)
// alone.
#include <algorithm>

#include "lane.h"

namespace tinyloop {
namespace {

struct Node {  // a token in the draft tree; nodes are in slot order, parents before children
    int32_t token;
    int parent;     // index, -1: the root, whose token is already accepted
    uint64_t tree;  // bits of itself and its ancestors
    int depth;
};

class Speculation {
  public:
    Speculation(Model& model, Lane& lane, const SpeculativeConfig& config, int branches)
        : model_(model),
          lane_(lane),
          config_(config),
          branches_(branches),
          cache_(lane.make_cache(config.draft_ahead * branches)),
          states_(model.make_states(1 + config.draft_ahead * branches)) {
        lane.out.stats.cache_bytes = cache_.bytes();
    }

    void run(const TokenCallback& on_token) {
        const Clock::time_point start = Clock::now();
        LogitRows logits(model_.config().vocab_size, {lane_.row(0, 0, 0, TL_ROW_LOGITS)});
        prefill_plain(lane_, 0, cache_, {cache_.get()}, logits[0]);
        lane_.out.stats.prefill_ms = ms_since(start);
        const Clock::time_point decoding = Clock::now();
        lane_.advance(logits[0]);
        lane_.mark_first(start);
        deliver(on_token);
        while (!lane_.stopped()) round(on_token);
        lane_.out.stats.decode_ms = ms_since(decoding);
        lane_.out.stats.generated_tokens = static_cast<int>(lane_.out.tokens.size());
        lane_.out.stats.mean_loops = lane_.out.stats.loops;
    }

  private:
    void deliver(const TokenCallback& on_token) {
        if (on_token && !on_token(lane_.out.tokens.back(), lane_.length() - 1)) lane_.cancel();
    }

    tl_row row_of(const Node& node, int index, int base) const {
        tl_row row = lane_.row(0, base + node.depth, node.token, 0);
        row.slot = base + index;
        row.base = base;
        row.tree = node.tree;
        row.state = index;
        return row;
    }

    // Drafts from the last accepted token, verifies, and takes what plain decoding would have taken.
    void round(const TokenCallback& on_token) {
        const int base = lane_.length() - 1;  // the root's slot: its token is known, its keys and values are not
        const int ahead =
            std::min(config_.draft_ahead, lane_.config.max_tokens - static_cast<int>(lane_.out.tokens.size()));
        std::vector<Node> nodes = {{lane_.out.tokens.back(), -1, 1, 0}};
        draft(nodes, base, ahead);

        std::vector<tl_row> rows;
        for (size_t i = 0; i < nodes.size(); ++i) {
            rows.push_back(row_of(nodes[i], static_cast<int>(i), base));
            rows.back().loop_begin = config_.draft_loops;
            rows.back().flags = TL_ROW_LOGITS;
        }
        LogitRows logits(model_.config().vocab_size, rows);
        model_.forward({cache_.get()}, states_.get(), rows, logits.all());
        lane_.out.stats.drafted += static_cast<int>(nodes.size()) - 1;

        for (int at = 0, kept = 0; at >= 0 && !lane_.stopped();) {
            cache_.move(base + kept++, base + at);
            lane_.advance(logits[static_cast<size_t>(at)]);
            const int32_t token = lane_.out.tokens.back();
            int next = -1;
            for (size_t i = 1; i < nodes.size(); ++i)
                if (nodes[i].parent == at && nodes[i].token == token) next = static_cast<int>(i);
            lane_.out.stats.accepted += next >= 0;
            deliver(on_token);
            at = next;
        }
    }

    // Grows the tree by up to `ahead` - 1 levels: the first has `branches` nodes, each then grows a chain. The nodes'
    // states at draft_loops stay in states_. The last level is not drafted on: its verification gives the token after
    // it.
    void draft(std::vector<Node>& nodes, int base, int ahead) {
        std::vector<int> leaves = {0};
        for (int level = 0; level < ahead; ++level) {
            std::vector<tl_row> rows;
            for (const int leaf : leaves) {
                rows.push_back(row_of(nodes[leaf], leaf, base));
                rows.back().loop_end = config_.draft_loops;
                rows.back().flags = level + 1 < ahead ? TL_ROW_LOGITS : 0;
                rows.back().best = best_of_draft(level);
            }
            LogitRows logits(model_.config().vocab_size, rows);
            model_.forward({cache_.get()}, states_.get(), rows, logits.all());
            if (level + 1 == ahead) return;
            std::vector<int> grown;
            for (size_t i = 0; i < leaves.size(); ++i) {
                const int leaf = leaves[i];
                for (int branch = 0; branch < branches_of(level); ++branch) {
                    if (config_.draft_margin > 0 && margin(logits[i]) < config_.draft_margin) break;
                    const int32_t token = guess(nodes, leaf, base, logits[i]);
                    if (token < 0) break;
                    grown.push_back(static_cast<int>(nodes.size()));
                    nodes.push_back(
                        {token, leaf, nodes[leaf].tree | uint64_t(1) << nodes.size(), nodes[leaf].depth + 1});
                    logits[i].drop(token);  // the next branch is another token
                }
            }
            if (grown.empty()) return;
            leaves = std::move(grown);
        }
    }

    int branches_of(int level) const { return level == 0 ? branches_ : 1; }

    // Of a draft's logits (tl_row.best): what the last branch needs, after the tokens of those before it.
    int best_of_draft(int level) const {
        const int each = lane_.decisive(), margin = config_.draft_margin > 0 ? 2 : 1;
        const int best = std::max(each, margin) + branches_of(level) - 1;
        return each > 0 && best <= model_.backend().most_best ? best : 0;
    }

    // How far the best logit leads the next.
    float margin(const RowLogits& logits) const {
        float best = -3e38f, next = -3e38f;
        const int count = logits.count ? logits.count : model_.config().vocab_size;
        for (int i = 0; i < count; ++i) {
            const float logit = logits.count ? logits.first[i].logit : logits.whole[i];
            next = std::max(next, std::min(best, logit));
            best = std::max(best, logit);
        }
        return best - next;
    }

    // What the sampler would say after the node's path.
    int32_t guess(const std::vector<Node>& nodes, int leaf, int base, RowLogits logits) {
        std::vector<int32_t> path;
        for (int at = leaf; at > 0; at = nodes[at].parent) path.push_back(nodes[at].token);
        for (const int32_t token : path) lane_.sampler.saw(token);
        std::vector<float> work;
        if (!logits.count) {
            work.assign(logits.whole, logits.whole + model_.config().vocab_size);
            logits.whole = work.data();
        }
        const int32_t token = lane_.sampler.sample(logits, base + nodes[leaf].depth + 1);
        for (const int32_t seen : path) lane_.sampler.unsaw(seen);
        return token;
    }

    Model& model_;
    Lane& lane_;
    const SpeculativeConfig& config_;
    const int branches_;
    Cache cache_;
    States states_;  // (nodes of a tree)
};

Generation speculate(Model* model, const int32_t* prompt, size_t prompt_len, const SpeculativeConfig& speculative,
                     const GenerateConfig& config, const TokenCallback& on_token, bool tree) {
    const std::vector<int32_t> tokens(prompt, prompt + prompt_len);
    const Call call(*model);
    SpeculativeConfig used = speculative;
    guard([&] {
        check_request(*model, tokens, config, tree ? kTreeSpeculative : kSpeculative);
        if (used.verify_loops == 0) used.verify_loops = model->loops_of(config.loops);
        model->loops_of(used.verify_loops);
        auto range = [](const char* field, int value, int low, int high) {
            if (value < low || value > high)
                refuse(ErrorKind::config, field, std::to_string(value),
                       std::to_string(low) + " to " + std::to_string(high));
        };
        range("draft_loops", used.draft_loops, 1, used.verify_loops);
        range("draft_ahead", used.draft_ahead, 1, std::min(32, model->options().prefill_chunk));
        if (!(used.draft_margin >= 0))
            refuse(ErrorKind::config, "draft_margin", std::to_string(used.draft_margin), "0 (off) or more");
        if (tree) range("branches", used.branches, 1, std::min(8, 63 / used.draft_ahead));
        if (tree) range("draft_ahead", 1 + (used.draft_ahead - 1) * used.branches, 1, model->options().prefill_chunk);
    });
    Lane lane(*model, tokens, config, used.verify_loops);
    Speculation(*model, lane, used, tree ? used.branches : 1).run(on_token);
    return std::move(lane.out);
}

}  // namespace

Generation generate_speculative(Model* model, const int32_t* prompt, size_t prompt_len,
                                const SpeculativeConfig& speculative, const GenerateConfig& config,
                                const TokenCallback& on_token) {
    return speculate(model, prompt, prompt_len, speculative, config, on_token, false);
}

Generation generate_tree_speculative(Model* model, const int32_t* prompt, size_t prompt_len,
                                     const SpeculativeConfig& speculative, const GenerateConfig& config,
                                     const TokenCallback& on_token) {
    return speculate(model, prompt, prompt_len, speculative, config, on_token, true);
}

}  // namespace tinyloop
