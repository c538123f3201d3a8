"""Models, sessions and what the server can do."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from .bounds import Detail, Id, Metadata, Path, Tags, Text
from .training import Integer, Natural, Seed, Strict, Wire

Role = Literal["policy", "critic", "reference", "draft"]
"""The kinds of model that can be created: see docs/roles.md, docs/drafts.md."""


Size = Annotated[int, Field(ge=1, le=2**31 - 1)]
Index = Annotated[int, Field(ge=0, le=2**31 - 1)]


class LoraConfig(Wire):
    """alpha (ours) is not on the SDK's wire; 32 at every rank. The adapter's scale is alpha / rank, as in PEFT."""

    rank: Size = 32
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 32.0


GATE_UP_PATTERN = r".*\.experts\.gate_up_proj"
"""Names what PEFT's files give a rank and an alpha of its own: gate and up of experts, one parameter with two pairs."""


class FullConfig(Wire):
    """Full fine-tuning: all weights are the model's own. seed: of what a critic's head starts from."""

    training: Literal["full"] = "full"
    seed: Seed | None = None


Algorithm = Literal["eagle3", "dflash"]
"""How a draft model guesses what its target will say."""


class DraftConfig(Wire):
    """A draft model for speculative decoding. What is None depends on the base model, and is filled in when it is made.

    num_layers: 1 of eagle3. capture_layers: of the target, counted from 0, whose outputs it reads. draft_vocab_size:
    how many of the target's tokens it can say, None = all. intermediate_size: of its MLP, None = the target's.
    block_size: of dflash, the token that is known and those that are guessed. mask_token_id: of dflash, stands for what
    is guessed.
    """

    training: Literal["draft"] = "draft"
    algorithm: Algorithm
    num_layers: Annotated[int, Field(ge=1, le=64)] | None = None
    capture_layers: Annotated[tuple[Index, ...], Field(max_length=1024)] | None = None
    draft_vocab_size: Size | None = None
    intermediate_size: Annotated[int, Field(ge=1, le=1 << 18)] | None = None
    block_size: Annotated[int, Field(ge=2, le=64)] | None = None
    mask_token_id: Index | None = None
    seed: Seed | None = None


class NewDraft(Strict, DraftConfig):
    """As it is asked for."""


TrainingConfig = LoraConfig | FullConfig | DraftConfig
"""What of a model is trained."""

_TRAININGS = {"full": FullConfig, "draft": DraftConfig}


def training_of(values: Mapping[str, Any]) -> TrainingConfig:
    """From the fields of one, as they were stored; those of LoRA do not say what they are."""
    seed = values.get("seed")
    if isinstance(seed, int) and not -(2**63) <= seed < 2**64:  # earlier versions accepted any
        values = {**values, "seed": seed % 2**63}
    return _TRAININGS.get(str(values.get("training")), LoraConfig).model_validate(values)


def lora_of(training: TrainingConfig) -> LoraConfig | None:
    """None: of a model of another kind."""
    return training if isinstance(training, LoraConfig) else None


def draft_of(training: TrainingConfig) -> DraftConfig | None:
    """None: of a model of another kind."""
    return training if isinstance(training, DraftConfig) else None


class OptimizerConfig(Wire):
    type: Id = "adamw"
    version: Integer | None = None


class CreateModelRequest(Wire):
    """model_role, training, seed, draft and target_path are ours. training None: "lora" where there is a lora_config,
    "full" where there is no draft either.

    seed: of a full model; that of LoRA is in lora_config, that of a draft model in draft. draft, target_path: of draft
    models, and the policy's checkpoint which they guess, None = the bare base model.
    """

    session_id: Id
    model_seq_id: Natural
    base_model: Path
    user_metadata: Metadata | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()
    model_role: Role = "policy"
    training: Literal["lora", "full"] | None = None
    seed: Seed | None = None
    draft: NewDraft | None = None
    target_path: Path | None = None
    type: Literal["create_model"] = "create_model"


class CreateModelResponse(Wire):
    """draft, with all that was left open, target_path, adapted and not_adapted (see GetInfoResponse) are ours."""

    model_id: str
    adapted: dict[str, int] | None = None
    not_adapted: dict[str, int] | None = None
    draft: DraftConfig | None = None
    target_path: str | None = None
    type: Literal["create_model"] = "create_model"


class GetInfoRequest(Wire):
    model_id: Id
    type: Literal["get_info"] = "get_info"


class ModelData(Wire):
    arch: str | None = None
    model_name: str | None = None
    tokenizer_id: str | None = None


class GetInfoResponse(Wire):
    """lora_alpha, target_modules, adapted, not_adapted, max_context_length, model_role, draft and target_path are ours.

    Of what is no LoRA lora_rank and lora_alpha are 0, and target_modules is empty. adapted, not_adapted: in how many
    layers the adapter has matrices for a linear layer of this name (mlp.up_proj, mlp.experts.up_proj), and in how many
    of them those of the base model stay alone, as a router's do. draft: with all that was left open.
    target_path: what a draft model guesses now, None = the bare base model.
    """

    model_id: str
    model_data: ModelData
    optimizer_config: OptimizerConfig = OptimizerConfig()
    is_lora: bool
    lora_rank: int
    model_name: str
    lora_alpha: float
    target_modules: list[str]
    adapted: dict[str, int] | None = None
    not_adapted: dict[str, int] | None = None
    max_context_length: int
    model_role: Role
    draft: DraftConfig | None = None
    target_path: str | None = None
    type: Literal["get_info"] = "get_info"


class SupportedModel(Wire):
    model_name: str
    max_context_length: int
    trainable: bool = True
    sampleable: bool = True


class ServerCapabilities(Wire):
    supported_models: list[SupportedModel]


class Limit(Wire):
    """limit None: there is none."""

    limit: int | None
    used: int


class Limits(Wire):
    """What the server lets a tenant have, and what of it is in use; beyond it, requests answer 429 with Retry-After.

    tenant: its name, as --tenant-weights takes it. sessions: open ones. queued_operations, queued_bytes: accepted and
    not answered yet, uploads included. tokens_per_minute: of training and sampling; `used` falls with time.
    result_bytes: kept on the server's disk. feature_bytes: captured for drafts. server_queued_bytes,
    server_feature_bytes: of all tenants together; what is used of them is the tenant's own share where whoever asks is
    no operator.
    """

    tenant: str
    sessions: Limit | None = None
    runs: Limit
    queued_operations: Limit
    queued_bytes: Limit
    tokens_per_minute: Limit
    server_queued_bytes: Limit
    result_bytes: Limit | None = None
    feature_bytes: Limit | None = None
    server_feature_bytes: Limit | None = None

    def of_tenant_alone(self) -> "Limits":
        """With nothing in it of what others use."""
        shares = {"server_queued_bytes": self.queued_bytes, "server_feature_bytes": self.feature_bytes}
        totals = {name: getattr(self, name) for name in shares}
        seen = {name: total.model_copy(update={"used": shares[name].used}) for name, total in totals.items() if total}
        return self.model_copy(update=seen)


class FeatureStock(Wire):
    """What is captured for drafts. num_bytes: on the server's disk. num_sequences: that are stored, num_references: to
    them, num_held: those that an unfinished step needs. num_waiting: captures that wait for room now; num_put_off:
    for which there was none in time, since the start."""

    num_bytes: int
    num_sequences: int
    num_references: int
    num_held: int
    num_waiting: int
    num_put_off: int


class Workers(Wire):
    """What the workers have in memory, by the names of their groups (the base model's, "MODEL (critic)", "MODEL
    (sampler 1)"), those that are being started again left out: bytes by purpose, on the device and elsewhere, how many
    models there are where, and what moving them has cost since the start, in bytes and milliseconds. features: what is
    captured for drafts."""

    groups: dict[str, dict[str, int]]
    features: FeatureStock | None = None


class CreateSessionRequest(Wire):
    tags: Tags = ()
    user_metadata: Metadata | None = None
    sdk_version: Id
    project_id: Id | None = None
    display_name: Text | None = None
    type: Literal["create_session"] = "create_session"


class CreateSessionResponse(Wire):
    session_id: str
    type: Literal["create_session"] = "create_session"


class HeartbeatRequest(Wire):
    session_id: Id
    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishReason(Wire):
    type: Literal["success", "errored", "interrupted"]


class FinishSessionRequest(Wire):
    reason: FinishReason
    detail: Detail | None = None


class SessionList(Wire):
    sessions: list[str]


class SessionInfo(Wire):
    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None


class Cursor(Wire):
    offset: int
    limit: int
    total_count: int


class CheckpointCopy(Wire):
    """At a mirror. error: why the last try failed; there will be another."""

    url: str
    state: Literal["waiting", "copied", "failed"]
    updated_at: datetime
    error: str | None = None


class Checkpoint(Wire):
    """checkpoint_id: `weights/NAME`, `sampler_weights/NAME` or `external_weights/NAME`. copies: None = no mirrors."""

    checkpoint_id: str
    checkpoint_type: Literal["training", "sampler", "external"]
    time: datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None
    copies: list[CheckpointCopy] | None = None


class TrainingRun(Wire):
    """model_role is ours."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    last_request_time: datetime
    corrupted: bool = False
    lora_rank: int | None = None
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, str] | None = None
    model_role: Role = "policy"


class TrainingRunList(Wire):
    training_runs: list[TrainingRun]
    cursor: Cursor


class CheckpointList(Wire):
    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class ClientConfig(Wire):
    """Flags of the official SDK that this server sets; for the others it uses its own defaults."""

    fwdbwd_max_chunk_len: int
    fwdbwd_max_chunk_bytes_count: int
    proto_compress_fwdbwd: bool = False
    parallel_fwdbwd_chunks: bool = True
    sample_use_retrieve_futures: bool = False
    custom_loss_server_side: bool = False


class ClientDynamicConfig(Wire):
    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = True


class HeartbeatResponse(Wire):
    type: Literal["session_heartbeat"] = "session_heartbeat"


class AssignProjectRequest(Wire):
    project_id: Id


class TelemetryResponse(Wire):
    status: Literal["accepted"] = "accepted"


class Health(Wire):
    status: Literal["ok"] = "ok"


class Readiness(Wire):
    """base_models: served name -> whether its workers are up. runs: live ones; of these runs_to_make_again have their
    state on disk alone since the server started or a worker died, until they are needed or rest for long. Both are
    None for whoever is no operator, and from a server that does no work now.

    holder: of a standby, the URL of the server that it sends requests on to. reason: of one that is unavailable.
    """

    status: Literal["ready", "stopping", "standby", "taking over", "unavailable"]
    base_models: dict[str, Literal["up", "restarting"]]
    runs: int | None = None
    runs_to_make_again: int | None = None
    holder: str | None = None
    reason: str | None = None


class TokenizerFiles(Wire):
    """File name -> URL of the file, fetched with the same API key."""

    files: dict[str, str]


class KeyOrganization(Wire):
    name: str


class KeyUser(Wire):
    email: str


class KeyDetails(Wire):
    org_details: KeyOrganization
    user_details: KeyUser


class OwnKey(Wire):
    """What `tinker auth login` shows of the key it was given. key_id 0: a key that an open server let in.

    Ours: scopes, and requests_per_minute (None = any number).
    """

    key_id: int
    name: str
    note: str
    details: KeyDetails
    scopes: list[str]
    requests_per_minute: int | None


class TokenResponse(Wire):
    jwt: str
