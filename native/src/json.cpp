#include "json.h"

#include <charconv>
#include <unordered_set>
#include <utility>

#include "tinyloop/errors.h"

namespace tinyloop {
namespace {

constexpr int kMaxDepth = 16;

class Reader {
  public:
    Reader(std::string_view text, const std::string& field) : text_(text), field_(field) {}

    Json document() {
        Json value = read(0);
        skip_space();
        if (at_ != text_.size()) fail("text after the end of the value");
        return value;
    }

  private:
    [[noreturn]] void fail(const std::string& why) const {
        refuse(ErrorKind::artifact, field_, "byte " + std::to_string(at_), "JSON: " + why);
    }

    void skip_space() {
        while (at_ < text_.size() &&
               (text_[at_] == ' ' || text_[at_] == '\t' || text_[at_] == '\n' || text_[at_] == '\r'))
            ++at_;
    }

    char peek() {
        if (at_ >= text_.size()) fail("unexpected end");
        return text_[at_];
    }

    void expect(std::string_view word) {
        if (text_.substr(at_, word.size()) != word) fail("unexpected character");
        at_ += word.size();
    }

    Json read(int depth) {
        if (depth > kMaxDepth) fail("nested too deeply");
        skip_space();
        Json value;
        switch (peek()) {
            case '{':
                object(value, depth);
                break;
            case '[':
                array(value, depth);
                break;
            case '"':
                value.kind = Json::Kind::string;
                value.string = quoted();
                break;
            case 't':
                expect("true");
                value.kind = Json::Kind::boolean;
                value.boolean = true;
                break;
            case 'f':
                expect("false");
                value.kind = Json::Kind::boolean;
                break;
            case 'n':
                expect("null");
                break;
            default:
                number(value);
        }
        return value;
    }

    void object(Json& value, int depth) {
        value.kind = Json::Kind::object;
        std::unordered_set<std::string> seen;
        expect("{");
        skip_space();
        if (peek() == '}') {
            ++at_;
            return;
        }
        for (;;) {
            skip_space();
            if (peek() != '"') fail("expected a key");
            std::string key = quoted();
            if (!seen.insert(key).second) fail("duplicate key " + key.substr(0, 60));
            skip_space();
            expect(":");
            value.members.push_back({std::move(key), read(depth + 1)});
            skip_space();
            if (peek() == '}') break;
            expect(",");
        }
        ++at_;
    }

    void array(Json& value, int depth) {
        value.kind = Json::Kind::array;
        expect("[");
        skip_space();
        if (peek() == ']') {
            ++at_;
            return;
        }
        for (;;) {
            value.items.push_back(read(depth + 1));
            skip_space();
            if (peek() == ']') break;
            expect(",");
        }
        ++at_;
    }

    void number(Json& value) {
        size_t begin = at_;
        auto digits = [&] {
            size_t first = at_;
            while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') ++at_;
            if (at_ == first) fail("expected a value");
        };
        if (peek() == '-') ++at_;
        size_t first = at_;
        digits();
        if (text_[first] == '0' && at_ - first > 1) fail("number with a leading zero");
        bool integer = true;
        if (at_ < text_.size() && text_[at_] == '.') {
            integer = false;
            ++at_;
            digits();
        }
        if (at_ < text_.size() && (text_[at_] == 'e' || text_[at_] == 'E')) {
            integer = false;
            ++at_;
            if (at_ < text_.size() && (text_[at_] == '+' || text_[at_] == '-')) ++at_;
            digits();
        }
        value.kind = Json::Kind::number;
        const char* end = text_.data() + at_;
        if (std::from_chars(text_.data() + begin, end, value.number).ec != std::errc()) fail("number out of range");
        value.is_integer = integer && std::from_chars(text_.data() + begin, end, value.integer).ec == std::errc();
    }

    unsigned hex4() {
        if (text_.size() - at_ < 4) fail("unexpected end");
        unsigned code = 0;
        const char* begin = text_.data() + at_;
        auto [end, error] = std::from_chars(begin, begin + 4, code, 16);
        if (error != std::errc() || end != begin + 4) fail("bad \\u escape");
        at_ += 4;
        return code;
    }

    void append_utf8(std::string& out, unsigned code) {
        if (code < 0x80) {
            out += static_cast<char>(code);
        } else if (code < 0x800) {
            out += static_cast<char>(0xC0 | (code >> 6));
            out += static_cast<char>(0x80 | (code & 0x3F));
        } else if (code < 0x10000) {
            out += static_cast<char>(0xE0 | (code >> 12));
            out += static_cast<char>(0x80 | ((code >> 6) & 0x3F));
            out += static_cast<char>(0x80 | (code & 0x3F));
        } else {
            out += static_cast<char>(0xF0 | (code >> 18));
            out += static_cast<char>(0x80 | ((code >> 12) & 0x3F));
            out += static_cast<char>(0x80 | ((code >> 6) & 0x3F));
            out += static_cast<char>(0x80 | (code & 0x3F));
        }
    }

    // One well-formed UTF-8 sequence (RFC 3629) of more than one byte, copied as it is.
    void multibyte(std::string& out) {
        auto byte = [&](size_t i) { return at_ + i < text_.size() ? static_cast<unsigned char>(text_[at_ + i]) : 0u; };
        unsigned lead = byte(0);
        size_t length = lead >= 0xC2 && lead <= 0xDF   ? 2
                        : lead >= 0xE0 && lead <= 0xEF ? 3
                        : lead >= 0xF0 && lead <= 0xF4 ? 4
                                                       : 0;
        if (length == 0) fail("not UTF-8");
        for (size_t i = 1; i < length; ++i)
            if ((byte(i) & 0xC0) != 0x80) fail("not UTF-8");
        if ((lead == 0xE0 && byte(1) < 0xA0) || (lead == 0xED && byte(1) > 0x9F) || (lead == 0xF0 && byte(1) < 0x90) ||
            (lead == 0xF4 && byte(1) > 0x8F))
            fail("not UTF-8");
        out.append(text_.substr(at_, length));
        at_ += length;
    }

    std::string quoted() {
        expect("\"");
        std::string out;
        for (;;) {
            char c = peek();
            if (c == '"') break;
            if (static_cast<unsigned char>(c) < 0x20) fail("control character in a string");
            if (static_cast<unsigned char>(c) >= 0x80) {
                multibyte(out);
                continue;
            }
            ++at_;
            if (c != '\\') {
                out += c;
                continue;
            }
            char escape = peek();
            ++at_;
            switch (escape) {
                case '"':
                    out += '"';
                    break;
                case '\\':
                    out += '\\';
                    break;
                case '/':
                    out += '/';
                    break;
                case 'b':
                    out += '\b';
                    break;
                case 'f':
                    out += '\f';
                    break;
                case 'n':
                    out += '\n';
                    break;
                case 'r':
                    out += '\r';
                    break;
                case 't':
                    out += '\t';
                    break;
                case 'u': {
                    unsigned code = hex4();
                    if (code >= 0xDC00 && code <= 0xDFFF) fail("lone surrogate");
                    if (code >= 0xD800 && code <= 0xDBFF) {
                        expect("\\u");
                        unsigned low = hex4();
                        if (low < 0xDC00 || low > 0xDFFF) fail("lone surrogate");
                        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
                    }
                    append_utf8(out, code);
                    break;
                }
                default:
                    fail("bad escape");
            }
        }
        ++at_;
        return out;
    }

    std::string_view text_;
    const std::string& field_;
    size_t at_ = 0;
};

}  // namespace

const Json* Json::find(std::string_view key) const {
    for (const auto& [name, value] : members)
        if (name == key) return &value;
    return nullptr;
}

Json parse_json(std::string_view text, const std::string& field) { return Reader(text, field).document(); }

}  // namespace tinyloop
