// A case of the sampling test or benchmark as a request.
#pragma once
#include "tinyloop/engine.h"

template <class Case>
tinyloop::GenerateConfig config_of(const Case& c, uint64_t seed = 0) {
    tinyloop::GenerateConfig config;
    config.temperature = c.temperature;
    config.top_k = c.top_k;
    config.top_p = c.top_p;
    config.min_p = c.min_p;
    config.repetition_penalty = c.repetition_penalty;
    config.seed = seed;
    return config;
}
