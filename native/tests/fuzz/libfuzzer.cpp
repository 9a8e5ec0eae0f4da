// libFuzzer's entry; FUZZ_TARGET is artifact or calls.
#include "fuzz/targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    fuzz::FUZZ_TARGET(data, size);
    return 0;
}
