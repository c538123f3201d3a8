"""What must survive a restart, as frozen records. Times are seconds since the epoch (UTC); None = has not happened."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

from ...schemas.models import Role, TrainingConfig

CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]
CopyState = Literal["waiting", "copied", "failed"]
SessionEnd = Literal["success", "errored", "interrupted", "expired"]


@dataclass(frozen=True)
class TenantRecord:
    """Whoever owns sessions, runs and checkpoints. Names are unique."""

    tenant_id: str
    name: str
    created_at: float


@dataclass(frozen=True)
class ApiKeyRecord:
    """key_hash: sha256 of the key in hex; the key itself is never stored. key_id is given by the store.

    scopes: None = all. requests_per_minute: None = no limit of its own.
    """

    key_id: int
    tenant_id: str
    key_hash: str
    created_at: float
    revoked_at: float | None = None
    scopes: tuple[str, ...] | None = None
    requests_per_minute: int | None = None


@dataclass(frozen=True)
class KeyCounts:
    """made: revoked keys included."""

    made: int
    revoked: int

    @property
    def in_force(self) -> int:
        return self.made - self.revoked


@dataclass(frozen=True)
class SessionRecord:
    """last_heartbeat_at is for reading: the expiry clock is kept by Sessions, in memory."""

    session_id: str
    tenant_id: str
    created_at: float
    last_heartbeat_at: float
    finished_at: float | None = None
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
    """A model being trained; run_id is its model id, `<session_id>:train:<model_seq_id>`. training.seed is drawn.

    target_path: of the checkpoint that a draft model guesses; None: the bare base model, or no draft. asked: a hash of
    the request that made it; None: an earlier version did, or no request.
    """

    run_id: str
    session_id: str
    tenant_id: str
    base_model: str
    training: TrainingConfig
    created_at: float
    last_request_at: float
    user_metadata: dict[str, str] | None = None
    role: Role = "policy"
    target_path: str | None = None
    asked: str | None = None

    def request_id(self, seq_id: int) -> str:
        """Of one of its operations."""
        return f"{self.run_id}:{seq_id}"


@dataclass(frozen=True)
class CheckpointRecord:
    """A published checkpoint; its files lie in `directory` with a manifest.json. Key: (run_id, kind, name).

    target_path: what its run guessed then, as RunRecord.target_path.
    """

    run_id: str
    tenant_id: str
    kind: CheckpointKind
    name: str
    directory: str
    size_bytes: int
    created_at: float
    expires_at: float | None
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
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"


@dataclass(frozen=True)
class CheckpointCopyRecord:
    """A checkpoint in another place. directory: the checkpoint's own. Key: (directory, mirror).

    mirror: the URL under which all copies lie; url: where this one lies.
    error: why the last of num_tries failed. updated_at: when the state last changed or a try ended.
    """

    directory: str
    mirror: str
    url: str
    state: CopyState
    error: str | None
    num_tries: int
    updated_at: float


@dataclass(frozen=True)
class LeaseRecord:
    """Which server carries out the work of a base model. Key: base_model.

    url: where others reach the holder. epoch: how many holders there have been, from 1.
    expires_at: by the clock of Store.acquire_leases; 0 = given back.
    """

    base_model: str
    holder: str
    url: str
    epoch: int
    expires_at: float


@dataclass(frozen=True)
class SamplerRecord:
    """A sampling session. model_path: the checkpoint it was made from. run_id: the run whose weights it has.
    draft_path: of the draft that guesses for it, where a request names no other.

    kind: "base" (no adapter), "checkpoint" (model_path), "snapshot" and "inflight" (ephemeral, of run_id).
    """

    sampler_id: str
    session_id: str
    tenant_id: str
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
        """What it samples, by the workers' names; None: the bare base model."""
        match self.kind:
            case "base":
                return None
            case "inflight":
                # One target per run, which every inflight save moves for all samplers that follow it.
                return f"{self.run_id}:inflight"
            case _:
                return self.sampler_id


@dataclass(frozen=True)
class ResultRecord:
    """Where the durable result of a request lies. place: file and offset in words of the writer's choosing."""

    request_id: str
    tenant_id: str
    place: str
    size_bytes: int
    encoding: str
    created_at: float


def string_metadata(metadata: Mapping[str, JsonValue] | None) -> dict[str, str] | None:
    """Requests may carry any JSON as values, answers must have strings: other values become their JSON text."""
    if metadata is None:
        return None
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}
