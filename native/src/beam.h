// Beam search for one prompt.
#pragma once
#include "lane.h"

namespace tinyloop {

// Answers rank by log-probability / length^length_penalty (Wu et al., arXiv 1609.08144, without its constant); ties go
// to the earlier beam, then the smaller token id. on_token is called for the best answer's tokens when it is known; a
// false there ends the calls, not the search.
Generation beam_search(Model& model, const std::vector<int32_t>& prompt, const GenerateConfig& config, int loops,
                       const TokenCallback& on_token);

}  // namespace tinyloop
