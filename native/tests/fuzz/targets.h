// The fuzz targets: any bytes in, no crash and no untyped exception out. scripts/fuzz runs them under libFuzzer with
// ASan and UBSan; corpus_test.cpp replays the corpus in every build.
#pragma once
#include <cstddef>
#include <cstdint>

namespace fuzz {

// The bytes are a model file: it is refused with a named field, or it loads and generates.
void artifact(const uint8_t* data, size_t size);

// The bytes are a sequence of calls on a tiny model: prefixes, handles, batches, speculation, cancels, bad fields.
// Aborts when an answer differs from a cold model's.
void calls(const uint8_t* data, size_t size);

}  // namespace fuzz
