"""Holds the parts of a server that routes call, at `app.state.services`."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from ...schemas.adapters.model_files import ModelFiles, model_files
from ...workers.dispatch import WorkerDispatch
from ..checkpoints.checkpoints import Checkpoints
from ..config.server_config import ServerConfig
from ..files.state_lock import LiveState
from ..journal.futures import Futures
from ..journal.journal import Journal
from ..journal.recordings import Recordings
from ..operations.evaluation_data import EvaluationData
from ..operations.features import Features
from ..runs.history import RunHistory
from ..runs.runs import Runs
from ..sampling.draft_loader import DraftLoader
from ..sampling.sampler_weights import SamplerWeights
from ..sampling.samplers import Samplers
from ..sampling.sampling_service import SamplingService
from ..store import Store
from ..telemetry.telemetry import Telemetry
from ..tenants.auth import Auth
from ..tenants.browser_sessions import BrowserSessions
from ..tenants.quotas import Quotas
from ..tenants.sessions import Sessions
from ..text.tokenizer import Tokenizers


@dataclass(frozen=True)
class Services:
    """The parts.

    model_files: of the base models by name, if only this machine can reach the server. started_at: seconds since 1970.
    """

    config: ServerConfig
    dispatch: WorkerDispatch
    store: Store
    auth: Auth
    browsers: BrowserSessions
    sessions: Sessions
    checkpoints: Checkpoints
    runs: Runs
    history: RunHistory
    sampler_weights: SamplerWeights
    drafts: DraftLoader
    features: Features
    evaluation_data: EvaluationData
    samplers: Samplers
    sampling: SamplingService
    futures: Futures
    journal: Journal
    recordings: Recordings
    quotas: Quotas
    telemetry: Telemetry
    tokenizers: Tokenizers
    live: LiveState
    model_files: Mapping[str, ModelFiles]
    started_at: float = field(default_factory=time.time)


def found_files(config: ServerConfig) -> dict[str, ModelFiles]:
    """Returns `Services.model_files`."""
    served = config.models.base_models if config.is_loopback else ()
    found = {model.name: model_files(str(model.source)) for model in served}
    return {name: files for name, files in found.items() if files is not None}


async def current_services(request: Request) -> Services:
    """Returns the server's services. Async because FastAPI would run a plain function in a thread for each request."""
    return request.app.state.services


ServicesDependency = Annotated[Services, Depends(current_services)]
