"""Services: the parts of a server that routes hand over to, at `app.state.services`."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from ..workers.dispatch import WorkerDispatch
from .adapters import Adapters
from .auth import Auth
from .checkpoints import Checkpoints
from .config import ServerConfig
from .drafts import Drafts
from .features import Features
from .futures import Futures
from .journal import Journal
from .leases import Tenure
from .quotas import Quotas
from .recordings import Recordings
from .runs import Runs
from .samplers import Samplers
from .sampling import Sampling
from .sessions import Sessions
from .store.base import Store
from .tokenizer import Tokenizers


@dataclass(frozen=True)
class Services:
    config: ServerConfig
    dispatch: WorkerDispatch
    store: Store
    auth: Auth
    sessions: Sessions
    checkpoints: Checkpoints
    runs: Runs
    adapters: Adapters
    drafts: Drafts
    features: Features
    samplers: Samplers
    sampling: Sampling
    futures: Futures
    journal: Journal
    recordings: Recordings
    quotas: Quotas
    tokenizers: Tokenizers
    tenure: Tenure | None


async def current_services(request: Request) -> Services:
    """Async although it awaits nothing: FastAPI would run a plain function in a thread, at each request."""
    return request.app.state.services


ServicesDependency = Annotated[Services, Depends(current_services)]
