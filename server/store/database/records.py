"""Frozen records of everything that must survive a restart.

Times are seconds since the epoch (UTC); None means that the event has not happened.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import JsonValue

from ....schemas.models import Role, TrainingConfig
from ....schemas.schedules import NO_SCHEDULES, RunSchedules

CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]
CopyState = Literal["waiting", "copied", "failed"]
SessionEnd = Literal["success", "errored", "interrupted", "expired"]


@dataclass(frozen=True)
class Stored:
    """The column of a field, as far as the field's type does not say it."""

    is_key: bool = False
    """A part of the table's primary key."""
    refers_to: str | None = None
    """The column of the foreign key."""
    is_unique: bool = False
    is_indexed: bool = False
    is_small: bool = False
    """An integer of 32 bits."""
    may_lack: bool = False
    """NULL in older rows, for the default."""


Key = Annotated[str, Stored(is_key=True)]
Unique = Annotated[str, Stored(is_unique=True)]
TenantId = Annotated[str, Stored(refers_to="tenants.tenant_id")]
SessionId = Annotated[str, Stored(refers_to="sessions.session_id", is_indexed=True)]


@dataclass(frozen=True)
class TenantRecord:
    """An owner of sessions, runs and checkpoints."""

    tenant_id: Key
    name: Unique
    created_at: float


@dataclass(frozen=True)
class ApiKeyRecord:
    """An API key belongs to a tenant. The key itself is never stored."""

    key_id: Annotated[int, Stored(is_key=True, is_small=True)]
    """Assigned by the store."""
    tenant_id: TenantId
    key_hash: Unique
    """sha256 of the key, in hex."""
    created_at: float
    revoked_at: float | None = None
    scopes: tuple[str, ...] | None = None
    """All, if None."""
    requests_per_minute: Annotated[int | None, Stored(is_small=True)] = None
    """No limit specific to this key, if None."""


@dataclass(frozen=True)
class KeyCounts:
    """Counts the API keys of all tenants; `created` includes revoked ones."""

    created: int
    revoked: int

    @property
    def active(self) -> int:
        return self.created - self.revoked


@dataclass(frozen=True)
class SessionRecord:
    """A session of a tenant."""

    session_id: Key
    tenant_id: TenantId
    created_at: float
    last_heartbeat_at: float
    """Only displayed; Sessions keeps the expiry clock in memory."""
    finished_at: Annotated[float | None, Stored(is_indexed=True)] = None
    end: SessionEnd | None = None
    end_detail: str | None = None
    tags: tuple[str, ...] = ()
    user_metadata: dict[str, str] | None = None
    sdk_version: str | None = None
    project_id: str | None = None
    display_name: str | None = None
    idempotency_key: str | None = None


@dataclass(frozen=True)
class RunRecord:
    """A training run, whose id `<session_id>:train:<model_seq_id>` is the `model_id` on the wire."""

    run_id: Key
    session_id: SessionId
    tenant_id: TenantId
    base_model: str
    training: TrainingConfig
    """The seed has been drawn if the request had none."""
    created_at: float
    last_request_at: float
    user_metadata: dict[str, str] | None = None
    role: Role = "policy"
    target_path: str | None = None
    """The checkpoint that a draft is trained for; None for the bare base model, and for other runs."""
    asked: str | None = None
    """Hash of the request that created it; None for older runs and those that no such request created."""
    schedules: Annotated[RunSchedules, Stored(may_lack=True)] = NO_SCHEDULES
    """Evaluations and checkpoints after optimizer steps."""


def checkpoint_path(run_id: str, kind: str, name: str) -> str:
    return f"tinker://{run_id}/{kind}/{name}"


@dataclass(frozen=True)
class CheckpointRecord:
    """A published checkpoint. Its files and a manifest.json are in `directory`.

    target_path: RunRecord.target_path at the time of the save.
    """

    run_id: Annotated[str, Stored(is_key=True, refers_to="runs.run_id")]
    kind: Annotated[CheckpointKind, Stored(is_key=True)]
    name: Key
    tenant_id: TenantId
    directory: str
    size_bytes: int
    created_at: float
    expires_at: Annotated[float | None, Stored(is_indexed=True)]
    public: bool
    user_metadata: dict[str, str] | None
    base_model: str
    training: TrainingConfig
    has_optimizer: bool
    role: Role = "policy"
    target_path: str | None = None

    @property
    def checkpoint_id(self) -> str:
        return f"{self.kind}/{self.name}"

    @property
    def tinker_path(self) -> str:
        return checkpoint_path(self.run_id, self.kind, self.name)


@dataclass(frozen=True)
class CheckpointCopyRecord:
    """A copy that a mirror has, or will have, of a checkpoint."""

    directory: Key
    """The checkpoint's directory."""
    mirror: Key
    """The URL below which all copies are stored."""
    url: str
    state: CopyState
    error: str | None
    """The reason for which the last of num_tries attempts failed."""
    num_tries: Annotated[int, Stored(is_small=True)]
    updated_at: float
    """When the state last changed or an attempt ended."""


LIVE_STATE = ""
"""Stands for the live state in the lease table. Base models have non-empty names."""


@dataclass(frozen=True)
class LeaseRecord:
    """Records which server does the work of a base model.

    url: where other servers reach the holder.
    epoch: counts the holders, from 1.
    expires_at: by the clock of LeaseTable.acquire; 0 if released.
    """

    base_model: Key
    holder: str
    url: str
    epoch: int
    expires_at: float


@dataclass(frozen=True)
class SamplerRecord:
    """A sampling session.

    kind: "base" (no adapter), "checkpoint" (of model_path), "snapshot" and "inflight" (ephemeral, of run_id).
    model_path: the checkpoint it was created from.
    run_id: the run whose weights it has.
    draft_path: the draft model used where a request names no other.
    """

    sampler_id: Key
    session_id: SessionId
    tenant_id: TenantId
    base_model: str
    created_at: float
    kind: Literal["base", "checkpoint", "snapshot", "inflight"] = "base"
    model_path: str | None = None
    run_id: str | None = None
    draft_path: str | None = None

    @property
    def is_ephemeral(self) -> bool:
        return self.kind in ("snapshot", "inflight")

    @property
    def adapter_id(self) -> str | None:
        """The workers' id of the weights to sample from; None for the bare base model."""
        match self.kind:
            case "base":
                return None
            case "inflight":
                # One id per run: each inflight save updates the weights of all samplers that follow the run.
                return f"{self.run_id}:inflight"
            case _:
                return self.sampler_id


@dataclass(frozen=True)
class ResultRecord:
    """Locates the durable result of a request."""

    request_id: Key
    tenant_id: TenantId
    place: str
    """File and offset, in the writer's own format."""
    size_bytes: int
    encoding: str
    created_at: Annotated[float, Stored(is_indexed=True)]


@dataclass(frozen=True)
class OperationRecord:
    """An operation of a run that has ended; no foreign key, since rows are written in batches, which one unknown run
    must not fail.

    queued_seconds: that it waited for the ranks while others had them: from when it had arrived and the operations
        before it in its run had ended, to the first pass or step that it was part of.
    busy_seconds: from then to its end.
    num_tokens: to be trained on or scored.
    step: the optimizer step that it took; None for other operations and failed steps.
    error: why it failed; None if it succeeded.
    metrics: of its result. Older steps have those of the passes before them, too (see RunHistory).
    """

    run_id: Key
    seq_id: Annotated[int, Stored(is_key=True)]
    kind: str
    ended_at: Annotated[float, Stored(is_indexed=True)]
    queued_seconds: float
    busy_seconds: float
    num_tokens: int
    step: int | None
    error: str | None
    metrics: dict[str, float]


@dataclass(frozen=True)
class LoggedMetricsRecord:
    """Metrics that a client logged for a step of a run. num_bytes: of the row."""

    run_id: Key
    step: Annotated[int, Stored(is_key=True)]
    logged_at: Annotated[float, Stored(is_indexed=True)]
    num_bytes: int
    metrics: dict[str, float]


def string_metadata(metadata: Mapping[str, JsonValue] | None) -> dict[str, str] | None:
    """Converts JSON values to strings: requests may carry any values, responses must have strings."""
    if metadata is None:
        return None
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}
