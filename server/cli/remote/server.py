"""The server that a command works through: its URL and the API key, from flags, a profile or the environment."""

import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import httpx

from .... import __version__
from ....client.connection import reason_in
from ....client.errors import APIConnectionError, APIStatusError, TrainhouseError, status_error
from ....client.futures import APIFuture
from ....client.rest import RestClient
from ....client.service import ServiceClient, url_and_key
from ....schemas.training import Wire
from ..errors import FAILED, NOT_FOUND, REFUSED, TRY_LATER, CommandFailed
from ..options import Status, flag, with_options
from ..output import print_json

T = TypeVar("T")

RETRY_SECONDS = 1.0  # short, because a user is waiting and can retry
_READ_SECONDS = 300.0
_OTHERS = 0o077


class Server:
    """A server, and how the command prints its results. as_json: as one JSON object."""

    def __init__(self, base_url: str | None, api_key: str | None, profile: str | None, as_json: bool) -> None:
        if profile is not None:
            base_url, api_key = _of_profile(profile, base_url, api_key)
        self.base_url, self._api_key = url_and_key(base_url, api_key)
        self.as_json = as_json

    def client(self) -> ServiceClient:
        return ServiceClient(self.base_url, self._api_key, retry_seconds=RETRY_SECONDS)

    def ask(self, question: Callable[[RestClient], APIFuture[T]]) -> T:
        with self.client() as service:
            return question(service.create_rest_client()).result()

    @contextmanager
    def openai(self) -> Iterator[httpx.Client]:
        """Yields a client for the paths below /v1/, which streams."""
        headers = {"X-API-Key": self._api_key, "User-Agent": f"trainhouse/{__version__}"}
        url = f"{self.base_url.rstrip('/').removesuffix('/api/v1')}/v1/"
        try:
            with httpx.Client(base_url=url, headers=headers, timeout=_READ_SECONDS) as client:
                yield client
        except httpx.HTTPError as error:
            raise APIConnectionError(f"no answer from {self.base_url} ({error}): start a server there") from None

    def print(self, found: Wire, print_text: Callable[[], object]) -> None:
        if self.as_json:
            print_json(found.model_dump(mode="json"))
        else:
            print_text()


def through_server(function: Callable[..., Status]) -> Callable[..., Status]:
    """Gives a command the flags that name a server; the command's first argument is the Server."""
    flags = [
        flag("base_url", "--base-url", "URL of the server (TRAINHOUSE_BASE_URL, http://127.0.0.1:8000).", "URL"),
        flag("api_key", "--api-key", "API key; the environment variable TRAINHOUSE_API_KEY is safer.", "KEY"),
        flag("profile", "--profile", "Table with base_url and api_key in ~/.config/trainhouse/profiles.toml.", "NAME"),
        flag("as_json", "--json", "Print one JSON object.", kind=bool),
    ]

    @wraps(function)
    def command(server: Mapping[str, Any], **values: Any) -> Status:
        try:
            return function(Server(**server), **values)
        except TrainhouseError as error:
            raise CommandFailed(str(error), _status(error)) from None

    return with_options(command, flags, dict)


def _status(error: TrainhouseError) -> int:
    if isinstance(error, APIConnectionError):
        return TRY_LATER
    if not isinstance(error, APIStatusError):
        return FAILED
    of_status = {401: REFUSED, 403: REFUSED, 404: NOT_FOUND, 410: NOT_FOUND, 408: TRY_LATER, 429: TRY_LATER}
    return of_status.get(error.status, TRY_LATER if error.status >= 500 else FAILED)


def check_answer(response: httpx.Response) -> None:
    """Raises APIStatusError if the server refused a request of `Server.openai`, whose body it reads."""
    if response.is_success:
        return
    response.read()
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):  # not in OpenAI's form
        message = reason_in(response)
    raise status_error(response.status_code, message)


def _of_profile(name: str, base_url: str | None, api_key: str | None) -> tuple[str, str]:
    """Returns the profile's URL and key, where flags give no others; its key is sent to no other URL than its own.

    The environment does not count: a key that it has may be another server's.
    """
    file = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "trainhouse" / "profiles.toml"
    profile = _read(file).get(name)
    if not isinstance(profile, dict) or not isinstance(profile.get("base_url"), str):
        raise ValueError(f"{file} has no profile {name!r} with a base_url: add [{name}] with base_url and api_key")
    own_key = profile.get("api_key") if base_url in (None, profile["base_url"]) else None
    key = api_key or own_key
    if not isinstance(key, str):
        raise ValueError(f"profile {name!r} in {file} has no api_key for this URL: add it, or give --api-key")
    return base_url or profile["base_url"], key


def _read(file: Path) -> Mapping[str, object]:
    try:
        if (mode := file.stat().st_mode) & _OTHERS:
            raise ValueError(f"{file} holds keys and others may read it (mode {mode & 0o777:o}): chmod 600 {file}")
        return tomllib.loads(file.read_text())
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist: write [NAME] with base_url and api_key into it, mode 600") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{file} is not valid TOML: {error}") from None
