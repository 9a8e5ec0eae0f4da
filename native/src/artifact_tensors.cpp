// The tensor entries of an artifact's header: each is checked against what the config asks for, against the file and
// against its neighbours (native/FORMAT.md).
#include <algorithm>
#include <unordered_map>

#include "artifact.h"

namespace tinyloop {
namespace {

constexpr uint64_t kPanelAlignment = 64;  // of a tensor in panels, in memory: mappings begin at a page

[[noreturn]] void bad(const std::string& field, const std::string& value, const std::string& accepted) {
    refuse(ErrorKind::artifact, field, value, accepted);
}

std::string field_of(const std::string& name) { return "tensor " + name.substr(0, 60); }

struct DtypeName {
    const char* name;
    int dtype;
    uint64_t bytes;
};
constexpr DtypeName kDtypes[] = {{"F32", TL_F32, 4}, {"F16", TL_F16, 2}, {"BF16", TL_BF16, 2}};

const DtypeName& dtype_of(const std::string& field, const Json* value) {
    for (const DtypeName& known : kDtypes)
        if (value && value->kind == Json::Kind::string && value->string == known.name) return known;
    bad(field + ".dtype", value ? value->string.substr(0, 20) : "missing", "F32, F16 or BF16");
}

std::string shape_text(const std::vector<int64_t>& shape) {
    std::string text = "[";
    for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
    return text + "]";
}

// What the last 16 outputs and, in every head, the last inputs or outputs are padded with. A model in panels gives the
// tokens of the same model in rows only if that is zero, and few matrices have any: then one panel is read.
bool padding_is_zero(const ExpectedTensor& want, const unsigned char* data, uint64_t element_bytes) {
    auto real = [](int64_t place, int64_t size, int head) {
        if (!head) return place < size;
        const int64_t padded = (head + 15) / 16 * 16;
        return place % padded < head && place / padded * head < size;
    };
    const int64_t panels = want.panels[0], inputs = want.panels[1], width = want.panels[2];
    const bool inputs_padded = inputs != want.shape[1];
    for (int64_t p = 0; p < panels; ++p) {
        bool padded = inputs_padded;
        for (int64_t j = 0; j < width; ++j) padded |= !real(p * width + j, want.shape[0], want.output_heads);
        for (int64_t k = 0; padded && k < inputs; ++k)
            for (int64_t j = 0; j < width; ++j) {
                if (real(p * width + j, want.shape[0], want.output_heads) && real(k, want.shape[1], want.input_heads))
                    continue;
                const unsigned char* element =
                    data + static_cast<uint64_t>((p * inputs + k) * width + j) * element_bytes;
                if (std::any_of(element, element + element_bytes, [](unsigned char byte) { return byte != 0; }))
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
    const DtypeName& dtype = dtype_of(field, entry.find("dtype"));

    const Json* shape_json = entry.find("shape");
    std::vector<int64_t> shape;
    if (shape_json)
        for (const Json& item : shape_json->items) shape.push_back(item.is_integer ? item.integer : -1);
    const bool panels = !want.panels.empty() && shape == want.panels;
    if (!panels && shape != want.shape)
        bad(field + ".shape", shape_json ? shape_text(shape) : "missing",
            shape_text(want.shape) + (want.panels.empty() ? "" : ", or in panels " + shape_text(want.panels)));
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
    const uint64_t alignment = panels ? kPanelAlignment : dtype.bytes;
    if (place % alignment)
        bad(field + ".data_offsets", shape_text({begin, end}),
            "a place in the file that is a multiple of " + std::to_string(alignment) + ", not " +
                std::to_string(place));
    const unsigned char* data = file_->data() + place;
    if (panels && !padding_is_zero(want, data, dtype.bytes)) bad(field, "not zero in its padding", "zeros there");

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
