"""The two kinds of errors that a user gets: an HTTP status, or a failed future."""

from typing import Literal

Category = Literal["user", "server", "unknown"]


class OperationError(Exception):
    """An accepted operation failed; its future returns this message and category.

    `user`: the request was wrong, and the message names the value and the remedy. `server`: the server failed.
    It is sent between processes, so it holds nothing but its two arguments.
    """

    def __init__(self, message: str, category: Category = "user") -> None:
        super().__init__(message, category)
        self.message = message
        self.category: Category = category

    def __str__(self) -> str:
        return self.message


class RequestError(Exception):
    """A request is refused at once with an HTTP status (4xx, or 503 if it may succeed later)."""

    def __init__(self, message: str, status: int = 400, retry_after_seconds: float | None = None) -> None:
        super().__init__(message, status, retry_after_seconds)
        self.message = message
        self.status = status
        self.retry_after_seconds = retry_after_seconds

    def __str__(self) -> str:
        return self.message


class InvalidBody(RequestError):
    """The body violates the protocol. The message quotes values of it, perhaps training data: it is not for the log."""
