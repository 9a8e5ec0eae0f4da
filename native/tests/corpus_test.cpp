// Replays the fuzzers' corpus: inputs that once reached new code, and every input that once broke something.
#include <filesystem>
#include <fstream>
#include <iterator>

#include "check.h"
#include "fuzz/targets.h"
#include "tiny_model.h"

int main() {
    if (!std::freopen("/dev/null", "w", stderr)) return 1;  // refusals write a line each
    for (const tiny::Layout layout :
         {tiny::Layout::rows, tiny::Layout::panels, tiny::Layout::int8, tiny::Layout::int4}) {
        const std::string model = tiny::bytes(tiny::config_json(), layout);
        fuzz::artifact(reinterpret_cast<const uint8_t*>(model.data()), model.size());
    }
    for (const char* target : {"artifact", "calls"})
        for (const auto& entry : std::filesystem::directory_iterator(std::string(TINYLOOP_CORPUS) + "/" + target)) {
            std::ifstream file(entry.path(), std::ios::binary);
            const std::string bytes((std::istreambuf_iterator<char>(file)), {});
            const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
            (std::string(target) == "calls" ? fuzz::calls : fuzz::artifact)(data, bytes.size());
            CHECK(true);
        }
    return finish();
}
