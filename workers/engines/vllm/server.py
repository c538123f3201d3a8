"""VllmServer: whom the engine asks, one of ours (vllm_process.py) or one that somebody else runs."""

from collections.abc import Callable, Sequence
from typing import Protocol


class VllmServer(Protocol):
    """A vLLM server that may come and go.

    name: for messages. url, api_key: of one of ours others after it was started again. num_starts: ever higher; what
    an earlier one held is gone. patience_seconds: how long requests wait for one that is away; None = until it is back.
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
    def patience_seconds(self) -> float | None: ...

    @property
    def is_ready(self) -> bool: ...

    @property
    def is_on_cpu(self) -> bool: ...

    @property
    def pids(self) -> Sequence[int]: ...

    async def start(self, on_progress: Callable[[str], None]) -> None:
        """Raises ValueError with the reason when it does not come up."""
        ...

    async def close(self) -> None: ...

    async def ready(self) -> None:
        """Waits while it is starting again. Raises OperationError when it will not."""
        ...


class VllmAt:
    """A vLLM server that somebody else runs."""

    num_starts = 0
    patience_seconds: float | None = 120.0
    is_ready = True
    is_on_cpu = False
    pids: Sequence[int] = ()

    def __init__(self, url: str, api_key: str | None) -> None:
        self.name = f"the vLLM at {url}"
        self.url = url.rstrip("/")
        self.api_key = api_key

    async def start(self, on_progress: Callable[[str], None]) -> None:
        on_progress(f"sampling by {self.name}")

    async def close(self) -> None:
        pass

    async def ready(self) -> None:
        pass
