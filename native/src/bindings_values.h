// Python values to the engine's and its errors back. Bad values become Errors that name the field.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <limits>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "tinyloop/engine.h"

namespace tinyloop {

namespace py = pybind11;
using Tokens = std::vector<int32_t>;
using CacheMode = std::optional<std::string>;  // None: the default

// Raises the class of native/errors.py for an Error.
void translate(std::exception_ptr pointer);

// Python's integers have no size; one that does not fit the engine's is a bad value, not a bad type.
template <class T>
T narrow(const char* field, const py::int_& value) {
    const T out = std::is_unsigned_v<T> ? static_cast<T>(PyLong_AsUnsignedLongLong(value.ptr()))
                                        : static_cast<T>(PyLong_AsLongLong(value.ptr()));
    const bool failed = PyErr_Occurred() != nullptr;
    PyErr_Clear();
    if (failed || !py::int_(out).equal(value))
        refuse(ErrorKind::config, field, py::str(value),
               std::to_string(std::numeric_limits<T>::min()) + " to " + std::to_string(std::numeric_limits<T>::max()));
    return out;
}

std::string name_of(const CacheMode& cache_mode);
Tokens tokens_of(const std::string& field, const py::handle& sequence);
std::vector<Tokens> sequences_of(const std::string& field, const py::handle& sequences);
GenerateConfig make_config(const py::int_& loops, const py::int_& max_tokens, double temperature, const py::int_& top_k,
                           double top_p, double min_p, double repetition_penalty, const py::int_& seed,
                           const py::object& stop_sequences, const py::object& grammar, const CacheMode& cache_mode,
                           const py::int_& cache_window, const py::int_& beam_size, double length_penalty,
                           const std::optional<double>& exit_threshold, bool ignore_eos,
                           const std::optional<bool>& speculative);
SpeculativeConfig make_speculative(const py::int_& draft_loops, const py::int_& verify_loops,
                                   const py::int_& draft_ahead, double draft_margin, const py::int_& branches);

}  // namespace tinyloop
