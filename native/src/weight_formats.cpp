#include "weight_formats.h"

#include <cstdlib>
#include <set>

#include "tinyloop/backend.h"

namespace tinyloop {
namespace {

struct Format {
    const char* name;
    int dtype;
};
constexpr Format kFormats[] = {
    {"fp16", TL_F16}, {"bf16", TL_BF16}, {"int8", TL_INT8}, {"int4", TL_INT4}, {"fp32", TL_F32}};
constexpr const char* kAccepted = "auto (what the artifact holds), fp16, bf16, int8 or int4";

bool is_end(const TensorInfo& tensor) { return tensor.name == "embed.weight" || tensor.name == "head.weight"; }

// Integers are as small as they get: turning them into other weights would only hide what was lost.
void check_stored(const std::string& field, const Format& asked, const ArtifactInfo& info) {
    for (const TensorInfo& tensor : info.tensors) {
        const bool integers = tensor.dtype == TL_INT8 || tensor.dtype == TL_INT4;
        const bool belongs =
            tensor.dtype == asked.dtype || (asked.dtype == TL_INT4 && tensor.dtype == TL_INT8 && is_end(tensor));
        if (integers && !belongs)
            refuse(ErrorKind::config, field, asked.name,
                   "auto or " + weight_format_name(TL_AS_STORED, info) + ", which the artifact holds");
    }
}

}  // namespace

int parse_weight_format(const std::string& asked, const ArtifactInfo& info) {
    std::string field = "weights", name = asked;
    if (asked == "auto") {
        const char* variable = std::getenv("TINYLOOP_WEIGHTS");
        if (!variable || !*variable) return TL_AS_STORED;
        field = "TINYLOOP_WEIGHTS";
        name = variable;
        if (name == "auto") return TL_AS_STORED;
    }
    for (const Format& format : kFormats)
        if (name == format.name && format.dtype != TL_F32) {
            check_stored(field, format, info);
            return format.dtype;
        }
    refuse(ErrorKind::config, field, name, kAccepted);
}

std::string weight_format_name(int dtype, const ArtifactInfo& info) {
    std::set<int> ends, layers;
    for (const TensorInfo& tensor : info.tensors)
        if (tensor.shape.size() > 1 && tensor.name != "exit_gate.weight")
            (is_end(tensor) ? ends : layers).insert(dtype == TL_AS_STORED ? tensor.dtype : dtype);
    if (layers == std::set<int>{TL_INT4} && ends == std::set<int>{TL_INT8}) ends = layers;
    ends.merge(layers);
    if (ends.size() == 1)
        for (const Format& format : kFormats)
            if (format.dtype == *ends.begin()) return format.name;
    return "mixed";
}

}  // namespace tinyloop
