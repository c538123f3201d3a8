"""Defines the errors that the client raises; all derive from TrainhouseError."""

from ..schemas.errors import Category


class TrainhouseError(Exception):
    """Base class of all errors of the client."""


class APIConnectionError(TrainhouseError):
    """The server could not be reached, or the connection was lost, for longer than the retries last."""


class RequestFailedError(TrainhouseError):
    """An accepted operation failed. category: "user" if the request was wrong, "server" if the server failed."""

    def __init__(self, message: str, category: Category) -> None:
        super().__init__(message)
        self.category: Category = category


class APIStatusError(TrainhouseError):
    """The server refused a request. message: the server's reason. status: the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(f"{message} (HTTP {status})")
        self.message = message
        self.status = status


class BadRequestError(APIStatusError):
    """400, 413, 415, 422: the request is malformed, too large, or has a value out of its range."""


class AuthenticationError(APIStatusError):
    """401: the API key is missing or unknown to the server."""


class PermissionDeniedError(APIStatusError):
    """403: the key lacks the permission, or the object belongs to another tenant."""


class NotFoundError(APIStatusError):
    """404: the model, run, checkpoint or endpoint does not exist for this API key, or the result has expired."""


class GoneError(APIStatusError):
    """410: the session has ended, the run can no longer be used, or a sampler's weights are lost."""


class RateLimitError(APIStatusError):
    """429: a limit was still exceeded when the retries ran out."""


class InternalServerError(APIStatusError):
    """5xx: the server was still failing when the retries ran out."""


_OF_STATUS: dict[int, type[APIStatusError]] = dict.fromkeys((400, 413, 415, 422), BadRequestError)
_OF_STATUS |= {401: AuthenticationError, 403: PermissionDeniedError, 404: NotFoundError}
_OF_STATUS |= {410: GoneError, 429: RateLimitError}


def status_error(status: int, message: str) -> APIStatusError:
    return _OF_STATUS.get(status, InternalServerError if status >= 500 else APIStatusError)(message, status)
