"""Paths of OpenAI's API: their scopes and form of errors. Imports nothing of the server, whose tables read it early."""

from typing import Any

from ...schemas.chats.openai import ErrorBody, OpenAiError

SCOPES = {
    "POST /v1/completions": ("sample",),
    "POST /v1/chat/completions": ("sample",),
    "GET /v1/models": ("sample", "read"),
    "GET /v1/models/{name:path}": ("sample", "read"),
}
LARGE_BODIES = dict.fromkeys(("POST /v1/completions", "POST /v1/chat/completions"))


def _error_body(message: str, status: int, error: Exception) -> dict[str, Any]:
    param, code = (error.param, error.code) if isinstance(error, OpenAiError) else (None, None)
    return ErrorBody.of(message, status, param, code).model_dump()


_MISSED = ("/chat/completions", "/completions", "/models")
"""Paths that OpenAI's clients request if their base URL lacks /v1."""

ERROR_BODIES = dict.fromkeys(("/v1/", *_MISSED), _error_body)
HINTS = dict.fromkeys(_MISSED, "OpenAI's API is at {base_url}v1 here: end the client's base URL with /v1")
"""Remedies for paths that are not found."""
