// A strict JSON reader for artifact headers: RFC 8259, no extensions, duplicate keys refused, depth and size bounded.
// Our own because the C++ core must read hostile headers without a dependency that a bare machine cannot install.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tinyloop {

struct JsonMember;

struct Json {
    enum class Kind { null, boolean, number, string, array, object };

    Kind kind = Kind::null;
    bool boolean = false;
    bool is_integer = false;  // written without fraction or exponent and fits int64
    int64_t integer = 0;
    double number = 0;
    std::string string;
    std::vector<Json> items;          // array
    std::vector<JsonMember> members;  // object, in file order

    const Json* find(std::string_view key) const;  // nullptr when absent or not an object
};

struct JsonMember {
    std::string name;
    Json value;
};

// Throws Error(artifact) whose field is `field` and which says where and why.
Json parse_json(std::string_view text, const std::string& field);

}  // namespace tinyloop
