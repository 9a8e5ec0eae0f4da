"""The one error tree that clients see; every refused or broken request becomes exactly one of these.

    TinyLoopError
    ├── RequestError          the request is at fault; sending it again unchanged fails again
    │   ├── InvalidRequest    a field has a value that is not accepted
    │   ├── LimitExceeded     the request can never fit this model, fleet or message size
    │   ├── ModeRefused       a combination that the mode matrix refuses
    │   ├── UnknownRequest    cancel of an id that is not live
    │   ├── HandleLost        names a handle that is not there (any more); `value` says which
    │   ├── PoisonRequest     replicas died under it, one after the other; it is not tried again
    │   └── Forbidden         this tenant may not
    ├── ServiceError          the service is at fault; sending it again later may work
    │   ├── Overloaded        the queue is full; `retry_after_s` says when to try again
    │   ├── Unavailable       no replica can serve it now
    │   ├── ReplicaLost       the replica died while it worked on the request
    │   └── EngineFailed      the engine failed on this request
    ├── DeadlineExceeded      the request's own deadline passed, or cannot be kept
    └── TransportError        between the client and the dispatcher
        ├── ConnectFailed     nobody answers at the endpoint
        ├── ProtocolError     the peer speaks another version or sent something malformed
        └── AuthError         the peer's key was refused

On the wire an error is `messages.Failed`; `code` is the class attribute of the same name.
"""

from __future__ import annotations

from typing import ClassVar, TypeVar, overload


class TinyLoopError(Exception):
    """Base of the tree.

    `field`, `value` and `accepted` name what was wrong, what was sent and what would be accepted (""
    where they do not apply); `request_id` is the request's id ("" before there is one); `retry_after_s`
    is in seconds.
    """

    code: ClassVar[str] = "error"

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        value: str = "",
        accepted: str = "",
        request_id: str = "",
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.value = value
        self.accepted = accepted
        self.request_id = request_id
        self.retry_after_s = retry_after_s


class RequestError(TinyLoopError):
    code = "request"


class InvalidRequest(RequestError):
    code = "invalid"


class LimitExceeded(RequestError):
    code = "limit"


class ModeRefused(RequestError):
    code = "mode"


class UnknownRequest(RequestError):
    code = "unknown_request"


class HandleLost(RequestError):
    code = "handle_lost"


class PoisonRequest(RequestError):
    code = "poison"


class Forbidden(RequestError):
    code = "forbidden"


class ServiceError(TinyLoopError):
    code = "service"


class Overloaded(ServiceError):
    code = "overloaded"


class Unavailable(ServiceError):
    code = "unavailable"


class ReplicaLost(ServiceError):
    code = "replica_lost"


class EngineFailed(ServiceError):
    code = "engine"


class DeadlineExceeded(TinyLoopError):
    code = "deadline"


class TransportError(TinyLoopError):
    code = "transport"


class ConnectFailed(TransportError):
    code = "connect"


class ProtocolError(TransportError):
    code = "protocol"


class AuthError(TransportError):
    code = "auth"


def _tree(root: type[TinyLoopError]) -> dict[str, type[TinyLoopError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


BY_CODE = _tree(TinyLoopError)
"""Wire code -> class. A code of a newer peer that is not here is raised as `TinyLoopError`."""


_Request = TypeVar("_Request", bound=RequestError)


@overload
def bad_field(field: str, value: object, accepted: str) -> InvalidRequest: ...
@overload
def bad_field(field: str, value: object, accepted: str, kind: type[_Request]) -> _Request: ...
def bad_field(
    field: str, value: object, accepted: str, kind: type[RequestError] = InvalidRequest
) -> RequestError:
    """A `kind` of error whose message names the field, the value and what would be accepted."""
    shown = repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    message = f"{field}: {shown} is not accepted; expected {accepted}"
    return kind(message, field=field, value=shown, accepted=accepted)
