// The reader of hostile files: JSON corner cases, named refusals, random truncation and 15,000 random mutations.
#include "artifact.h"

#include <cstring>
#include <tuple>

#include "check.h"
#include "json.h"
#include "tiny_model.h"

using namespace tinyloop;

namespace {

std::string json_error(const std::string& text) {
    try {
        parse_json(text, "t");
        return "";
    } catch (const Error& error) {
        return error.what();
    }
}

void test_json() {
    const Json value = parse_json(R"( {"a":[1,-2.5e3,true,null,"x\u00e9\ud83d\ude00\n"],"b":{}} )", "t");
    CHECK(value.find("a")->items[0].is_integer && value.find("a")->items[0].integer == 1);
    CHECK(!value.find("a")->items[1].is_integer && value.find("a")->items[1].number == -2500);
    CHECK(value.find("a")->items[4].string == "x\xc3\xa9\xf0\x9f\x98\x80\n");
    CHECK(value.find("b")->kind == Json::Kind::object && !value.find("c"));
    for (const char* bad : {"",         "{",     "[1,]",  "{\"a\":1,}", "{\"a\":1,\"a\":2}", "01",
                            "1.",       "-",     "+1",    "nul",        "\"\\x\"",           "\"\\ud800\"",
                            "\"a\nb\"", "[1]x",  "1e999", "\"\xff\"",   "\"\xc0\x80\"",      "\"\xed\xa0\x80\"",
                            "\"abc",    "{1:2}", "[1 2]"})
        CHECK(!json_error(bad).empty());
    CHECK(json_error(std::string(100000, '[')).find("nested") != std::string::npos);
    CHECK(parse_json("9223372036854775807", "t").is_integer && !parse_json("9223372036854775808", "t").is_integer);
}

std::string field_of(const std::string& content) {
    const tiny::File file(content);
    try {
        Artifact artifact(file.path());
        return "";
    } catch (const Error& error) {
        CHECK(error.kind == ErrorKind::artifact);
        CHECK(std::string(error.what()).find(error.field) != std::string::npos);
        return error.field;
    }
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
    const size_t at = text.find(from);
    CHECK(at != std::string::npos);
    if (at != std::string::npos) text.replace(at, from.size(), to);
    return text;
}

void test_named_refusals() {
    const std::string good = tiny::bytes();
    CHECK(field_of(good).empty());
    CHECK(field_of("") == "file size");
    CHECK(field_of(good.substr(0, good.size() - 1)).find("data_offsets") != std::string::npos);
    CHECK(field_of(good + "x") == "file size");
    CHECK(field_of(std::string(8, '\xff') + good.substr(8)) == "header length");
    // Same-length edits of the header keep the offsets right.
    CHECK(field_of(replaced(good, "\"format\":\"tinyloop\"", "\"format\":\"tinyl00p\"")) == "__metadata__.format");
    CHECK(field_of(replaced(good, "format_version\":\"1\"", "format_version\":\"9\"")) ==
          "__metadata__.format_version");
    CHECK(field_of(replaced(good, "\\\"n_heads\\\":4", "\\\"n_heads\\\":0")) == "config.n_heads");
    CHECK(field_of(replaced(good, "\\\"n_kv_heads\\\":2", "\\\"n_kv_heads\\\":3")) == "config.n_kv_heads");
    CHECK(field_of(replaced(good, "\\\"head_dim\\\":6", "\\\"head_dim\\\":5")) == "config.head_dim");
    CHECK(field_of(replaced(good, "\\\"sandwich\\\"", "\\\"sandwish\\\"")) == "config.norm");
    CHECK(field_of(replaced(good, "\\\"loops\\\":3", "\\\"loops\\\":9")) == "config.max_loops");
    CHECK(field_of(replaced(good, "\\\"eos_ids\\\":[]", "\\\"eos_idz\\\":[]")) == "config.eos_ids");
    CHECK(field_of(replaced(good, "\\\"bos_id\\\":null", "\\\"bos_id\\\":\\\"x\\\"")) == "config.bos_id");
    CHECK(field_of(replaced(good, "\"dtype\":\"F32\"", "\"dtype\":\"F64\"")) == "tensor embed.weight.dtype");
    CHECK(field_of(replaced(good, "\"shape\":[61,24]", "\"shape\":[24,61]")) == "tensor embed.weight.shape");
    CHECK(field_of(replaced(good, "\"data_offsets\":[0,", "\"data_offsets\":[4,")) ==
          "tensor embed.weight.data_offsets");
    CHECK(field_of(replaced(good, "core.1.wq.weight", "core.9.wq.weight")) == "tensor core.9.wq.weight");
    // A matrix may be in panels, a vector may not.
    CHECK(field_of(replaced(good, "\"shape\":[24]", "\"shape\":[2,24,16]")) == "tensor final_norm.weight.shape");
    std::string message;
    try {
        inspect_artifact("/nonexistent/model.tinyloop");
    } catch (const Error& error) {
        message = error.what();
    }
    CHECK(message.find("/nonexistent/model.tinyloop") != std::string::npos);
}

// The header's entry of a tensor.
std::string entry_of(const std::string& file, const std::string& name) {
    const size_t at = file.find("\"" + name + "\"");
    return file.substr(at, file.find('}', at) + 1 - at);
}

size_t data_of(const std::string& file, const std::string& name) {
    const std::string entry = entry_of(file, name), key = "\"data_offsets\":[";
    uint64_t header = 0;
    std::memcpy(&header, file.data(), 8);
    return 8 + header + std::stoul(entry.substr(entry.find(key) + key.size()));
}

void test_refusals_in_panels() {
    const std::string good = tiny::bytes(tiny::config_json(), tiny::Layout::panels);
    CHECK(field_of(good).empty());
    CHECK(field_of(replaced(good, "\"shape\":[4,24,16]", "\"shape\":[4,16,24]")) == "tensor embed.weight.shape");
    CHECK(field_of(replaced(good, "\"shape\":[4,24,16]", "\"shape\":[5,24,16]")) == "tensor embed.weight.shape");
    CHECK(field_of(replaced(good, "\"dtype\":\"F32\"", "\"dtype\":\"F16\"")) == "tensor embed.weight.data_offsets");
    CHECK(field_of(replaced(good, std::string(64, 'a'), std::string(64, 'x'))) == "__metadata__.data_sha256");

    // Padding: of the vocabulary's last panel, of a head's outputs, of a head's inputs.
    for (const auto& [name, element] :
         {std::pair{"embed.weight", (3 * 24 + 23) * 16 + 13}, {"core.0.wq.weight", 6}, {"core.1.wo.weight", 6 * 16}}) {
        std::string bad = good;
        bad[data_of(good, name) + static_cast<size_t>(element) * 4 + 3] = 1;
        CHECK(field_of(bad) == "tensor " + std::string(name));
    }

    // Out of place: a header that is 4 longer, and queries, keys and values that are not neighbours.
    std::string shifted = replaced(good, "{\"__metadata__\"", "    {\"__metadata__\"");
    shifted[0] = static_cast<char>(shifted[0] + 4);
    CHECK(field_of(shifted) == "tensor embed.weight.data_offsets");
    const std::string wk = entry_of(good, "core.0.wk.weight"), wv = entry_of(good, "core.0.wv.weight");
    const std::string swapped =
        replaced(replaced(good, wk, replaced(wv, ".wv.", ".w?.")), wv, replaced(wk, ".wk.", ".wv."));
    CHECK(field_of(replaced(swapped, ".w?.", ".wk.")) == "tensor core.0.wk.weight.data_offsets");
}

void test_refusals_of_integers() {
    const std::string int8 = tiny::bytes(tiny::config_json(), tiny::Layout::int8);
    const std::string int4 = tiny::bytes(tiny::config_json(), tiny::Layout::int4);
    CHECK(field_of(int8).empty() && field_of(int4).empty());
    CHECK(field_of(replaced(int8, "\"shape\":[4,9,16,4]", "\"shape\":[4,8,18,4]")) == "tensor embed.weight.shape");
    CHECK(field_of(replaced(int8, "\"shape\":[4,9,16,4]", "\"shape\":[61,   24]")) == "tensor embed.weight.shape");
    const std::string gate = entry_of(int4, "core.0.w_gate.weight");
    for (const auto& [from, to] : {std::pair{",288]", ",144]"}, {"\"U8\"", "\"I8\""}})
        CHECK(field_of(replaced(int4, gate, replaced(gate, from, to))) == "tensor core.0.w_gate.weight.shape");
    const std::string norm = entry_of(int8, "final_norm.weight");
    CHECK(field_of(replaced(int8, norm, replaced(norm, "\"F32\"", "\"I8\" "))) == "tensor final_norm.weight.dtype");
    // Scales of outputs that pad: of the vocabulary's last panel, of a head.
    for (const auto& [file, name, at] : {std::tuple{&int8, "embed.weight", 3 * 576 + 512 + 13 * 4},
                                         {&int8, "core.0.wq.weight", 512 + 6 * 4},
                                         {&int4, "core.0.wq.weight", 256 + 6 * 2}}) {
        std::string bad = *file;
        bad[data_of(bad, name) + static_cast<size_t>(at)] = 1;
        CHECK(field_of(bad) == "tensor " + std::string(name));
    }
}

void test_fingerprint() {
    const tiny::File file;
    auto fingerprint = [&](std::string content, size_t changed) {
        content[changed] = static_cast<char>(content[changed] ^ 2);
        file.write(content);
        return inspect_artifact(file.path()).fingerprint;
    };
    for (const tiny::Layout layout : {tiny::Layout::rows, tiny::Layout::panels}) {
        const std::string good = tiny::bytes(tiny::config_json(), layout);
        file.write(good);
        const std::string whole = inspect_artifact(file.path()).fingerprint;
        // Where the header holds the data's hash, it says all.
        CHECK((fingerprint(good, good.size() - 1) == whole) == (layout == tiny::Layout::panels));
        CHECK(fingerprint(good, good.find("1e-5") + 3) != whole);
        if (layout == tiny::Layout::panels) CHECK(fingerprint(good, good.find("aaaa") + 5) != whole);
    }
}

// Every outcome but a crash, a sanitizer report or an untyped exception is fine: a refusal names a field, and what is
// accepted can be loaded and run.
void test_mutations(tiny::Layout layout, int rounds) {
    const std::string good = tiny::bytes(tiny::config_json(), layout);
    const size_t header_end = good.find_last_of('}') + 1;
    std::mt19937 random(7);
    const tiny::File file;
    int refused = 0, accepted = 0;
    for (int round = 0; round < rounds; ++round) {
        std::string bad = good;
        if (round < 500) {
            bad.resize(random() % good.size());
        } else {
            const int edits = 1 + static_cast<int>(random() % 3);
            for (int i = 0; i < edits; ++i) {
                const size_t at = random() % 10 ? random() % header_end : random() % bad.size();
                switch (random() % 4) {
                    case 0:
                        bad[at] = static_cast<char>(random());
                        break;
                    case 1:
                        bad[at] = "0123456789{}[],:\"\\-e."[random() % 21];
                        break;
                    case 2:
                        bad.erase(at, 1 + random() % 8);
                        break;
                    default:
                        bad.insert(at, std::string(1 + random() % 4, static_cast<char>(random())));
                }
            }
        }
        file.write(bad);
        try {
            LoadOptions options;
            options.threads = 1;
            options.prefill_chunk = 4;
            Model* model = load_model(file.path(), options);
            ++accepted;
            const int32_t prompt[] = {0};
            GenerateConfig config;
            config.max_tokens = 1;
            if (max_seq_len(model) > 1) generate(model, prompt, 1, config);
            free_model(model);
        } catch (const Error& error) {
            ++refused;
            if (error.field.empty()) CHECK(!"a refusal without a field");
        }
    }
    std::printf("%d mutations refused, %d accepted\n", refused, accepted);
    CHECK(refused + accepted == rounds && refused > rounds / 2 && accepted > 0);
}

}  // namespace

int main() {
    if (!std::freopen("/dev/null", "w", stderr)) return 1;  // thousands of refusals are not news
    test_json();
    test_named_refusals();
    test_refusals_in_panels();
    test_refusals_of_integers();
    test_fingerprint();
    test_mutations(tiny::Layout::rows, 6000);
    for (const tiny::Layout layout : {tiny::Layout::panels, tiny::Layout::int8, tiny::Layout::int4})
        test_mutations(layout, 3000);
    return finish();
}
