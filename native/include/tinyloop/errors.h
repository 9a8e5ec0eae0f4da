// Every refusal of the engine is one of these: what was wrong, what was sent, what would be accepted.
#pragma once
#include <stdexcept>
#include <string>
#include <utility>

namespace tinyloop {

enum class ErrorKind {
    artifact,     // the file is truncated, mislabelled or hostile
    config,       // a field of a request or an option has a value that is not accepted
    limit,        // the request can never fit
    mode,         // a combination that the mode matrix refuses
    busy,         // two calls at once on one model
    closed,       // used after it was closed
    unavailable,  // the device or backend is not there
    failed,       // the device failed while it computed; the call has no result
    memory        // out of memory; the model is still usable
};

struct Error : std::runtime_error {
    Error(ErrorKind kind_, std::string field_, std::string value_, std::string accepted_, const std::string& message)
        : std::runtime_error(message),
          kind(kind_),
          field(std::move(field_)),
          value(std::move(value_)),
          accepted(std::move(accepted_)) {}

    ErrorKind kind;
    std::string field;
    std::string value;
    std::string accepted;
};

// "field: value is not accepted; expected accepted"
[[noreturn]] inline void refuse(ErrorKind kind, const std::string& field, const std::string& value,
                                const std::string& accepted) {
    std::string shown = value.size() > 80 ? value.substr(0, 77) + "..." : value;
    std::string message = field + ": " + shown + " is not accepted; expected " + accepted;
    throw Error(kind, field, shown, accepted, message);
}

}  // namespace tinyloop
