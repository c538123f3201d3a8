"""Turns errors into responses, in our format, or in OpenAI's on its paths."""

import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ...schemas.codec import describe_errors
from ...schemas.errors import InvalidBody, RequestError
from ...workers.protocol.plugins import plugin_rows
from ...workers.protocol.work_context import CURRENT_WORK, note_refusal
from ..store.database.database_errors import OUTAGE_ERRORS, driver_message, outage_message

logger = logging.getLogger(__name__)

ErrorHandler = Callable[[Request, Exception], Awaitable[Response]]

_DATABASE_RETRY_SECONDS = 2
_BODIES, _HINTS = (plugin_rows("server.openai.paths", table) for table in ("ERROR_BODIES", "HINTS"))


def _error(
    request: Request, error: Exception, message: str, status: int, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Returns an error response in the format of OpenAI's API or of ours, depending on the path."""
    message = message.encode(errors="backslashreplace").decode()  # it may quote half a surrogate pair
    make = _row_of(_BODIES, request)
    return JSONResponse(make(message, status, error) if make else {"detail": message}, status, headers)


def _row_of(rows: Mapping[str, Any], request: Request) -> Any:
    """Returns the row whose key the path begins with, or None."""
    return next((row for prefix, row in rows.items() if request.url.path.startswith(prefix)), None)


async def error_response(request: Request, error: Exception) -> JSONResponse:
    """Returns the response to a RequestError, with Retry-After if it has one."""
    assert isinstance(error, RequestError)
    note_refusal("the body violates the protocol" if isinstance(error, InvalidBody) else error.message)
    headers = {}
    if error.retry_after_seconds is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after_seconds))
        headers["Retry-After-Ms"] = str(round(1000 * error.retry_after_seconds))  # the SDK reads this one first
    if error.status == 401:
        headers["WWW-Authenticate"] = 'Bearer error="invalid_token"'  # the SDK exchanges its key for a new token then
    return _error(request, error, error.message, error.status, headers)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    note_refusal("a parameter of the request is wrong")  # the message quotes it
    return _error(request, error, describe_errors(list(error.errors())), 400)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    detail = error.detail
    if error.status_code == 404 and request.url.path.startswith("/api/v1/api/v1"):
        detail = f"the base URL is {request.base_url}, without /api/v1: clients append that themselves"
    elif error.status_code == 404 and (hint := _row_of(_HINTS, request)):
        detail = hint.format(base_url=request.base_url)
    elif error.status_code == 405 and error.headers and (allowed := error.headers.get("Allow")):
        detail = f"{request.url.path} accepts {allowed}, not {request.method}"
    elif error.status_code == 404 and detail == "Not Found":
        detail = f"there is no {request.method} {request.url.path} here: see /docs for all routes"
    return _error(request, error, detail, error.status_code, error.headers)


async def _client_disconnected(request: Request, error: Exception) -> JSONResponse:
    # The client has disconnected, so no one reads the response; nothing was submitted, and the client will retry.
    logger.info("a client disconnected during %s %s", request.method, request.url.path)
    return _error(request, error, "the connection closed before the body was complete", 400)


async def _no_database(request: Request, error: Exception) -> JSONResponse:
    # 503, since a retry may succeed.
    assert isinstance(error, SQLAlchemyError)
    logger.error("%s %s: the database fails (%s)", request.method, request.url.path, driver_message(error))
    message = f"{outage_message(error)}: try again, or free space there"
    note_refusal(message)
    return _error(request, error, message, 503, {"Retry-After": str(_DATABASE_RETRY_SECONDS)})


async def internal_error(request: Request, error: Exception) -> JSONResponse:
    work = CURRENT_WORK.get()
    place = "" if work is None else f" (request {work.request})"
    return _error(request, error, f"internal error in {request.method} {request.url.path}: the log has it{place}", 500)


ERROR_HANDLERS: Mapping[type[Exception], ErrorHandler] = {
    RequestError: error_response,
    RequestValidationError: _invalid,
    HTTPException: _http_error,
    ClientDisconnect: _client_disconnected,
    **dict.fromkeys(OUTAGE_ERRORS, _no_database),
}
"""The handlers of the errors that a request may cause; any other is an internal error."""

HANDLED_ERRORS = tuple(ERROR_HANDLERS)


async def handle_error(request: Request, error: Exception) -> Response:
    """Returns the response to one of HANDLED_ERRORS, for middleware that runs outside FastAPI."""
    return await next(handle for kind, handle in ERROR_HANDLERS.items() if isinstance(error, kind))(request, error)
