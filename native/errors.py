"""The errors of the engine, one tree; the C++ core looks these classes up by name and raises them.

    TinyLoopError               something was refused, or failed; nothing was half done
    ├── ArtifactError           a model file, or what was to be written into one, is not valid
    ├── ConfigError             one field of a request is out of range or of the wrong kind
    ├── LimitError              the fields together exceed a limit of the model (prompt + max_tokens ...)
    ├── ModeError               a combination of modes that the mode matrix refuses
    ├── ModelBusyError          a model or a handle was used by two threads at once
    ├── ClosedError             a model or a handle was used after it was closed
    ├── BackendUnavailable      the asked device or instruction set is not present on this machine
    ├── BackendFailed           the device failed while it computed; the call has no result
    └── OutOfMemoryError        memory for weights, a cache or a handle could not be had

This file imports nothing, so that whoever needs the names (importers, tools, tests) needs no compiled core.
"""


class TinyLoopError(Exception):
    """Base of all engine errors: which `field` was refused, the `value` it had, what is `accepted` instead.

    The three are for programs, the message for people; they are None where the error is not about one field.
    """

    def __init__(
        self, message: str, *, field: str | None = None, value: object = None, accepted: str | None = None
    ) -> None:
        super().__init__(message)
        self.field = field
        self.value = value
        self.accepted = accepted

    def __reduce__(self) -> tuple[object, ...]:
        # Exception pickles positional arguments only; workers pass these errors between processes.
        return (_rebuild, (type(self), str(self), self.field, self.value, self.accepted))


class ArtifactError(TinyLoopError):
    """A model file, or what was to be written into one, is not valid."""


class ConfigError(TinyLoopError):
    """One field of a request is out of range or of the wrong kind."""


class LimitError(TinyLoopError):
    """Each field is fine, but together they exceed a limit of the model or of the machine's budget."""


class ModeError(TinyLoopError):
    """A combination of modes that the mode matrix refuses."""


class ModelBusyError(TinyLoopError):
    """A model or a handle was used by two threads at once."""


class ClosedError(TinyLoopError):
    """A model or a handle was used after it was closed."""


class BackendUnavailable(TinyLoopError):
    """The asked device or instruction set is not present on this machine."""


class BackendFailed(TinyLoopError):
    """The device failed while it computed: the call has no result. The next may work; after the loss of a
    device none does."""


class OutOfMemoryError(TinyLoopError):
    """Memory for weights, a cache or a handle could not be had."""


def refusal(field: str, value: object, accepted: str) -> ArtifactError:
    """An ArtifactError whose message says all three; long values are cut."""
    shown = repr(value)
    shown = shown if len(shown) <= 200 else shown[:197] + "..."
    return ArtifactError(
        f"{field} = {shown} is not valid; accepted: {accepted}", field=field, value=value, accepted=accepted
    )


def _rebuild(
    kind: type[TinyLoopError], message: str, field: str | None, value: object, accepted: str | None
) -> TinyLoopError:
    return kind(message, field=field, value=value, accepted=accepted)
