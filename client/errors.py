"""What a call can raise. Every class is a TrainhouseError."""

from ..schemas.errors import Category


class TrainhouseError(Exception):
    """Base of all errors of the client."""


class APIConnectionError(TrainhouseError):
    """The server could not be reached, or broke off, for longer than the retries last."""


class RequestFailedError(TrainhouseError):
    """An accepted operation failed. category: "user" = the request was wrong, "server" = the server failed it."""

    def __init__(self, message: str, category: Category) -> None:
        super().__init__(message)
        self.category: Category = category


class APIStatusError(TrainhouseError):
    """The server refused a request with an HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(f"{message} (HTTP {status})")
        self.message = message
        self.status = status


class BadRequestError(APIStatusError):
    """400, 413, 415, 422: the request is malformed, too large, or has a value out of its range."""


class AuthenticationError(APIStatusError):
    """401: no API key, or one that the server does not know."""


class PermissionDeniedError(APIStatusError):
    """403: it exists and belongs to someone else."""


class NotFoundError(APIStatusError):
    """404: no such model, run, checkpoint or endpoint, for this API key."""


class GoneError(APIStatusError):
    """410: the session has expired, or the result was dropped after its time."""


class RateLimitError(APIStatusError):
    """429, and the retries have run out."""


class InternalServerError(APIStatusError):
    """5xx, and the retries have run out."""


_OF_STATUS: dict[int, type[APIStatusError]] = dict.fromkeys((400, 413, 415, 422), BadRequestError)
_OF_STATUS |= {401: AuthenticationError, 403: PermissionDeniedError, 404: NotFoundError}
_OF_STATUS |= {410: GoneError, 429: RateLimitError}


def status_error(status: int, message: str) -> APIStatusError:
    return _OF_STATUS.get(status, InternalServerError if status >= 500 else APIStatusError)(message, status)
