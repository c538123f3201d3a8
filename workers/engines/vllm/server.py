"""The vLLM servers that the engine can use: one of ours (vllm_process.py), or one at a URL that others run."""

from collections.abc import Callable, Sequence
from typing import Protocol


class VllmServer(Protocol):
    """A vLLM server, which may be down at times.

    name: for messages.
    url, api_key: may change when our own server restarts.
    num_starts: increases with each start, which loses everything loaded before.
    retry_seconds: how long requests wait while the server is down; None means until it is back.
    """

    @property
    def name(self) -> str: ...

    @property
    def url(self) -> str: ...

    @property
    def api_key(self) -> str | None: ...

    @property
    def num_starts(self) -> int: ...

    @property
    def retry_seconds(self) -> float | None: ...

    @property
    def is_ready(self) -> bool: ...

    @property
    def is_on_cpu(self) -> bool: ...

    @property
    def pids(self) -> Sequence[int]: ...

    async def start(self, on_progress: Callable[[str], None]) -> None:
        """Raises ValueError with the reason if the server does not start."""
        ...

    async def close(self) -> None: ...

    async def ready(self) -> None:
        """Waits while the server restarts. Raises OperationError if it will not."""
        ...


class RemoteVllm:
    """A vLLM server that others run."""

    num_starts = 0
    retry_seconds: float | None = 120.0
    is_ready = True
    is_on_cpu = False
    pids: Sequence[int] = ()

    def __init__(self, url: str, api_key: str | None) -> None:
        self.name = f"the vLLM at {url}"
        self.url = url.rstrip("/")
        self.api_key = api_key

    async def start(self, on_progress: Callable[[str], None]) -> None:
        on_progress(f"sampling with {self.name}")

    async def close(self) -> None:
        pass

    async def ready(self) -> None:
        pass
