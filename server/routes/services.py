"""The parts of a server, which routes find at `app.state.services`."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request

from ...schemas.adapters.model_files import ModelFiles, model_files
from ...workers.dispatch import WorkerDispatch
from ...workers.protocol.plugins import plugin_rows
from ..checkpoints.checkpoints import Checkpoints
from ..config.server_config import ServerConfig
from ..files.state_lock import LiveState
from ..journal.completion_log import Completions
from ..journal.futures import Futures
from ..journal.journal import Journal
from ..journal.recordings import Recordings
from ..journal.restore_marker import RestoreMarker
from ..journal.snapshot_store import SnapshotStore
from ..operations.context import OperationContext
from ..operations.evaluation_data import EvaluationData
from ..operations.features import Features
from ..operations.pinned_checkpoints import PinnedCheckpoints
from ..runs.history import RunHistory
from ..runs.run_state import RunServices
from ..runs.runs import Runs
from ..sampling.constraint_checks import ConstraintChecks
from ..sampling.draft_loader import DraftLoader
from ..sampling.ephemeral_weights import EphemeralWeights
from ..sampling.execution import SamplingExecution
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

if TYPE_CHECKING:
    from ..telemetry.tracing import Tracing


class Services:
    """The parts of a server, each of which is given those before it that it calls."""

    def __init__(
        self,
        config: ServerConfig,
        dispatch: WorkerDispatch,
        store: Store,
        live: LiveState,
        tracing: "Tracing | None" = None,
    ) -> None:
        directory, sync, limits = live.directory, config.store.durability == "power", config.limits
        store.required_lease = live.lease
        self.started_at = time.time()  # seconds since 1970
        self.config, self.dispatch, self.store, self.live = config, dispatch, store, live
        self.telemetry = Telemetry(dispatch, config.process.slow_pass_seconds, tracing)
        self.tokenizers = Tokenizers(config.models.base_models)
        self.model_files = found_files(config)

        # Tenants, and what they have.
        self.auth = Auth(store, config.is_loopback, unauthenticated_per_minute=limits.unauthenticated_per_minute)
        self.browsers = BrowserSessions()
        self.quotas = Quotas(config)
        expiry_seconds = config.sessions.session_expiry_seconds
        self.sessions = Sessions(store, expiry_seconds, check_room=self.quotas.check_sessions)
        self.checkpoints = Checkpoints(store, self.auth, config.store.state_dir, config=config.storage_config())

        # Logs of what was accepted and answered.
        self.history = RunHistory(store, config.journal.history_ttl_seconds, limits.tenant_metric_bytes)
        self.journal = Journal(directory / "journal", config.journal.journal_segment_bytes, sync, live.guard)
        self.journal.on_durable = self.telemetry.journal_written
        self.futures = Futures(
            directory / "results",
            store,
            config.journal.result_ttl_seconds,
            config.journal.result_memory_bytes,
            sync=sync,
            guard=live.guard,
            on_operations=self.history.has_grown,
        )
        completions, recordings = Completions(self.futures), Recordings(directory / "recordings", sync)

        # Samplers, and runs, which save to them. Samplers of full weights read those of live runs.
        self.drafts = DraftLoader(dispatch, self.checkpoints)
        self.sampler_weights = SamplerWeights(
            dispatch, self.checkpoints, EphemeralWeights(directory / "ephemeral", sync)
        )
        self.samplers = Samplers(
            dispatch, store, self.sessions, self.checkpoints, self.sampler_weights, self.drafts, completions
        )
        self.context = OperationContext(
            dispatch,
            store,
            self.sessions,
            self.checkpoints,
            self.samplers,
            recordings,
            PinnedCheckpoints(directory / "loaded", sync),
            _features(directory / "features", config),
            EvaluationData(directory / "evaluations", sync, limits.tenant_evaluation_bytes),
        )
        self.runs = Runs(
            RunServices(
                config,
                self.context,
                self.futures,
                self.journal,
                SnapshotStore(directory / "snapshots", sync),
                RestoreMarker(directory),
                self.quotas,
                self.telemetry,
            )
        )
        self.sampler_weights.live = self.runs
        constraints = ConstraintChecks(self.tokenizers, dispatch.models)
        self.sampling = SamplingService(
            dispatch,
            self.samplers,
            SamplingExecution(dispatch, self.sampler_weights, self.drafts, constraints, self.telemetry),
            self.drafts,
            self.sessions,
            self.futures,
            self.journal,
            recordings,
            completions,
            self.quotas,
        )

        for name, words, read in (
            ("live_runs", "Runs that the server holds", self.runs.num_live),
            ("lost_runs", "Runs that are still to be rebuilt", lambda: self.runs.num_lost),
            ("open_sessions", "Sessions that are open", lambda: len(self.sessions.open_ids)),
            ("journal_entries", "Entries of the journal that a restart would need", lambda: self.journal.num_held),
            ("unstored_results", "Results whose place is not stored yet", lambda: self.futures.num_unstored),
        ):
            self.telemetry.metrics.add_gauge(f"trainhouse_{name}", words, read)


def _features(directory: Path, config: ServerConfig) -> Features:
    """Returns the store of captured features, an empty one without draft models."""
    stores = plugin_rows("server.drafts.rows", "FEATURES").values()
    return next((make(directory, config) for make in stores), Features())


def found_files(config: ServerConfig) -> Mapping[str, ModelFiles]:
    """Returns the files of the base models by name, if only this machine can reach the server."""
    served = config.models.base_models if config.is_loopback else ()
    found = {model.name: model_files(str(model.source)) for model in served}
    return {name: files for name, files in found.items() if files is not None}


async def current_services(request: Request) -> Services:
    """Returns the server's services. Async because FastAPI would run a plain function in a thread for each request."""
    return request.app.state.services


ServicesDependency = Annotated[Services, Depends(current_services)]
