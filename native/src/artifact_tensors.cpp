// The tensor entries of an artifact's header: each is checked against what the config asks for, against the file and
// against its neighbours (native/FORMAT.md).
#include <algorithm>
#include <unordered_map>

#include "artifact.h"

namespace tinyloop {
namespace {

constexpr uint64_t kPanelAlignment = 64, kInt4Alignment = 32;  // of a tensor in panels; mappings begin at a page

[[noreturn]] void bad(const std::string& field, const std::string& value, const std::string& accepted) {
    refuse(ErrorKind::artifact, field, value, accepted);
}

std::string field_of(const std::string& name) { return "tensor " + name.substr(0, 60); }

struct DtypeName {
    const char* name;
    int dtype;
    uint64_t bytes;
};
constexpr DtypeName kDtypes[] = {
    {"F32", TL_F32, 4}, {"F16", TL_F16, 2}, {"BF16", TL_BF16, 2}, {"I8", TL_INT8, 1}, {"U8", TL_INT4, 1}};

const DtypeName& dtype_of(const ExpectedTensor& want, const std::string& field, const Json* value) {
    const bool matrix = !want.panels.empty();
    for (const DtypeName& known : kDtypes)
        if (value && value->kind == Json::Kind::string && value->string == known.name && (matrix || known.bytes > 1))
            return known;
    bad(field + ".dtype", value ? value->string.substr(0, 20) : "missing",
        matrix ? "F32, F16, BF16, I8 or U8" : "F32, F16 or BF16");
}

std::string shape_text(const std::vector<int64_t>& shape) {
    std::string text = "[";
    for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
    return text + "]";
}

// The shape of the matrix in panels of this type.
std::vector<int64_t> panel_shape(const ExpectedTensor& want, int dtype) {
    const int64_t panels = want.panels[0], groups = (want.panels[1] + 31) / 32;
    if (dtype == TL_INT8) return {panels, groups * 8 + 1, 16, 4};  // the last: 16 float scales
    if (dtype == TL_INT4) return {panels, groups, 288};            // 256 bytes of two weights each, 16 fp16 scales
    return want.panels;
}

// Whether place i of an axis of `size` elements, in heads of `head` where that is not 0, is one of them.
bool real(int64_t i, int64_t size, int head) {
    if (!head) return i < size;
    const int64_t padded = (head + 15) / 16 * 16;
    return i % padded < head && i / padded * head < size;
}

// Outputs that pad the last panel or a head must be zero, or integers of scale zero, and so must floats that pad
// inputs: else the model would not give the tokens of the same model in rows. Few matrices have any padding, and then
// mostly one panel of it, so little is read.
bool padding_is_zero(const ExpectedTensor& want, int dtype, const unsigned char* data) {
    const std::vector<int64_t> shape = panel_shape(want, dtype);
    uint64_t panel_bytes = dtype == TL_F32 ? 4 : dtype == TL_F16 || dtype == TL_BF16 ? 2 : 1;
    const uint64_t element = panel_bytes;
    for (size_t i = 1; i < shape.size(); ++i) panel_bytes *= static_cast<uint64_t>(shape[i]);
    auto zero = [](const unsigned char* at, uint64_t bytes) {
        return std::all_of(at, at + bytes, [](unsigned char byte) { return byte == 0; });
    };
    const bool padded_inputs = want.panels[1] != want.shape[1];
    for (int64_t p = 0; p < shape[0]; ++p, data += panel_bytes)
        for (int64_t j = 0; j < 16; ++j) {
            const bool output = real(p * 16 + j, want.shape[0], want.output_heads);
            const uint64_t at = static_cast<uint64_t>(j);
            if (dtype == TL_INT8) {
                if (!output && !zero(data + panel_bytes - 64 + at * 4, 4)) return false;
            } else if (dtype == TL_INT4) {
                for (uint64_t group = 0; !output && group < panel_bytes; group += 288)
                    if (!zero(data + group + 256 + at * 2, 2)) return false;
            } else {
                for (int64_t k = 0; (!output || padded_inputs) && k < shape[1]; ++k)
                    if (!(output && real(k, want.shape[1], want.input_heads)) &&
                        !zero(data + (static_cast<uint64_t>(k) * 16 + at) * element, element))
                        return false;
            }
        }
    return true;
}

}  // namespace

void Artifact::read_tensors(const Json& header, size_t data_begin) {
    std::unordered_map<std::string, ExpectedTensor> wanted;
    for (ExpectedTensor& want : expected_tensors(info_.config)) {
        std::string name = want.name;
        wanted.emplace(std::move(name), std::move(want));
    }
    for (const auto& [name, entry] : header.members) {
        if (name == "__metadata__") continue;
        auto want = wanted.find(name);
        if (want == wanted.end()) bad(field_of(name), "present", "only the tensors that the config asks for");
        read_tensor(want->second, entry, data_begin);
        wanted.erase(want);
    }
    if (!wanted.empty()) {
        std::string first = wanted.begin()->first;  // the smallest name, so that the message does not depend on hashing
        for (const auto& [name, want] : wanted) first = std::min(first, name);
        bad("tensor " + first, "missing", "this tensor, and " + std::to_string(wanted.size() - 1) + " more");
    }
    check_span(data_begin);
    check_joined();
}

void Artifact::read_tensor(const ExpectedTensor& want, const Json& entry, size_t data_begin) {
    const std::string field = field_of(want.name);
    for (const auto& [key, value] : entry.members)
        if (key != "dtype" && key != "shape" && key != "data_offsets")
            bad(field + "." + key.substr(0, 60), "present", "dtype, shape, data_offsets");
    const DtypeName& dtype = dtype_of(want, field, entry.find("dtype"));

    const Json* shape_json = entry.find("shape");
    std::vector<int64_t> shape;
    if (shape_json)
        for (const Json& item : shape_json->items) shape.push_back(item.is_integer ? item.integer : -1);
    const std::vector<int64_t> in_panels = want.panels.empty() ? want.panels : panel_shape(want, dtype.dtype);
    const bool panels = !in_panels.empty() && shape == in_panels, integers = dtype.bytes == 1;
    if (!panels && (integers || shape != want.shape))
        bad(field + ".shape", shape_json ? shape_text(shape) : "missing",
            integers            ? shape_text(in_panels)
            : in_panels.empty() ? shape_text(want.shape)
                                : shape_text(want.shape) + ", or in panels " + shape_text(in_panels));
    uint64_t count = 1;  // no overflow: every expected dimension is bounded by parse_config
    for (int64_t size : shape) count *= static_cast<uint64_t>(size);

    const Json* offsets = entry.find("data_offsets");
    if (!offsets || offsets->items.size() != 2 || !offsets->items[0].is_integer || !offsets->items[1].is_integer)
        bad(field + ".data_offsets", "malformed", "two integers");
    const int64_t begin = offsets->items[0].integer, end = offsets->items[1].integer;
    const uint64_t data_bytes = file_->size() - data_begin;
    if (begin < 0 || end < begin || static_cast<uint64_t>(end) > data_bytes)
        bad(field + ".data_offsets", shape_text({begin, end}),
            "offsets within the file's " + std::to_string(data_bytes) + " data bytes");
    if (static_cast<uint64_t>(end - begin) != count * dtype.bytes)
        bad(field + ".data_offsets", shape_text({begin, end}), std::to_string(count * dtype.bytes) + " bytes");
    const uint64_t place = data_begin + static_cast<uint64_t>(begin);
    const uint64_t alignment = !panels ? dtype.bytes : dtype.dtype == TL_INT4 ? kInt4Alignment : kPanelAlignment;
    if (place % alignment)
        bad(field + ".data_offsets", shape_text({begin, end}),
            "a place in the file that is a multiple of " + std::to_string(alignment) + ", not " +
                std::to_string(place));
    const unsigned char* data = file_->data() + place;
    if (panels && !padding_is_zero(want, dtype.dtype, data)) bad(field, "not zero in its padding", "zeros there");

    info_.tensors.push_back({want.name, dtype.dtype, shape, static_cast<uint64_t>(end - begin)});
    uint64_t parameters = 1;
    for (int64_t size : want.shape) parameters *= static_cast<uint64_t>(size);
    info_.parameters += parameters;
    views_[want.name] = {data, dtype.dtype, static_cast<int32_t>(want.shape[0]),
                         want.shape.size() > 1 ? static_cast<int32_t>(want.shape[1]) : 1, panels ? TL_PANELS : TL_ROWS};
}

// The tensors fill the data without a hole or an overlap.
void Artifact::check_span(size_t data_begin) const {
    std::vector<std::pair<const unsigned char*, const TensorInfo*>> order;
    for (const TensorInfo& info : info_.tensors)
        order.emplace_back(static_cast<const unsigned char*>(views_.at(info.name).data), &info);
    std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    uint64_t at = data_begin;
    for (const auto& [data, info] : order) {
        const uint64_t begin = static_cast<uint64_t>(data - file_->data());
        if (begin != at)
            bad(field_of(info->name) + ".data_offsets", std::to_string(begin - data_begin),
                std::to_string(at - data_begin) + ": no holes, no overlap");
        at += info->bytes;
    }
    if (at != file_->size())
        bad("file size", std::to_string(file_->size()), std::to_string(at) + ": no bytes after the last tensor");
}

// Queries, keys and values are one matrix to a backend: in panels they must lie as one.
void Artifact::check_joined() const {
    std::unordered_map<std::string, const TensorInfo*> infos;
    for (const TensorInfo& info : info_.tensors) infos.emplace(info.name, &info);
    for (const auto& [name, info] : infos) {
        if (!name.ends_with(".wq.weight")) continue;
        const std::string stem = name.substr(0, name.size() - std::string("wq.weight").size());
        const TensorInfo* before = info;
        for (const char* part : {"wk.weight", "wv.weight"}) {
            const TensorInfo* next = infos.at(stem + part);
            const tl_tensor &a = views_.at(before->name), &b = views_.at(next->name);
            if (a.layout != b.layout || (a.layout == TL_PANELS && a.dtype != b.dtype))
                bad(field_of(next->name), "in another layout or type than " + before->name,
                    "in panels all three of wq, wk and wv, of one type");
            if (a.layout == TL_PANELS && static_cast<const char*>(a.data) + before->bytes != b.data)
                bad(field_of(next->name) + ".data_offsets", "not right after " + before->name,
                    "wq, wk and wv one after the other in panels");
            before = next;
        }
    }
}

}  // namespace tinyloop
