"""Messages about models, sessions, listings and the state of the server."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from .bounds import Detail, Id, Metadata, Path, Tags, Text
from .schedules import RunSchedules
from .training import Integer, Natural, Request, Seed, Strict, TargetRepr, Wire

Role = Literal["policy", "critic", "reference", "draft"]
"""The kinds of models that can be created: see docs/roles.md, docs/drafts.md."""


Size = Annotated[int, Field(ge=1, le=2**31 - 1)]
Index = Annotated[int, Field(ge=0, le=2**31 - 1)]


ExpertFactors = Literal["shared", "each"]
"""The matrices of an adapter for the experts of a sparse layer. "shared": those at the side of the hidden states (A of
gate and up, B of down) are shared by all experts of a layer, and the others are each expert's own. "each": every expert
has both."""


class LoraConfig(Request):
    """Configures a LoRA adapter. Its scale is alpha / rank, as in PEFT; alpha and expert_factors (ours) are not sent by
    the SDK.

    expert_factors: null in a request means "shared"; null in what is stored means "each", which is what versions
    without this field trained.
    """

    synonyms: ClassVar[Mapping[str, str]] = {
        "r": "rank",
        "lora_rank": "rank",
        "lora_alpha": "alpha",
        "target_modules": "train_attn, train_mlp and train_unembed, which select whole groups of layers",
    }

    rank: Size = 32
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 32.0
    expert_factors: ExpertFactors | None = None


class FullConfig(Wire):
    """Configures full fine-tuning: all weights are trained. seed: initializes a critic's head."""

    training: Literal["full"] = "full"
    seed: Seed | None = None


Algorithm = Literal["eagle3", "dflash"]
"""The algorithm by which a draft model predicts its target's tokens."""


class DraftConfig(Wire):
    """Configures a draft model for speculative decoding.

    Fields that are null have defaults that depend on the base model, and are filled in when the draft is created.

    num_layers: always 1 for eagle3. capture_layers: layers of the target whose outputs the draft reads, counted from 0.
    draft_vocab_size: size of the draft's vocabulary, null for all of the target's tokens. intermediate_size: of its
    MLP, null for the target's. block_size: for dflash, one known token and the draft tokens after it. mask_token_id:
    for dflash, the input in the place of draft tokens.
    target_repr: for eagle3, the form in which the draft reads its target's distribution, see TargetRepr.
    target_top_k: with pruned_logits, the number of logits that are kept of each token; null for those of the draft's
    vocabulary.
    """

    training: Literal["draft"] = "draft"
    algorithm: Algorithm
    num_layers: Annotated[int, Field(ge=1, le=64)] | None = None
    capture_layers: Annotated[tuple[Index, ...], Field(max_length=1024)] | None = None
    draft_vocab_size: Size | None = None
    intermediate_size: Annotated[int, Field(ge=1, le=1 << 18)] | None = None
    block_size: Annotated[int, Field(ge=2, le=64)] | None = None
    mask_token_id: Index | None = None
    target_repr: TargetRepr | None = None
    target_top_k: Annotated[int, Field(ge=1, le=1 << 16)] | None = None
    seed: Seed | None = None

    def differs_in(self, other: "DraftConfig") -> str | None:
        """Returns a field in which the shapes of the drafts differ; None if they have the same."""
        names = [name for name in DraftConfig.model_fields if name not in ("seed", "target_repr", "target_top_k")]
        return next((name for name in names if getattr(self, name) != getattr(other, name)), None)


class NewDraft(Strict, DraftConfig):
    """Configures a draft model that is created; unknown fields are refused."""


TrainingConfig = LoraConfig | FullConfig | DraftConfig
"""Selects which weights of a model are trained."""

_TRAININGS = {"full": FullConfig, "draft": DraftConfig}


def training_of(values: Mapping[str, Any]) -> TrainingConfig:
    """Returns the configuration with these stored fields. Those of LoRA have no `training` field."""
    seed = values.get("seed")
    if isinstance(seed, int) and not -(2**63) <= seed < 2**64:  # earlier versions accepted any
        values = {**values, "seed": seed % 2**63}
    return _TRAININGS.get(str(values.get("training")), LoraConfig).model_validate(values)


def lora_of(training: TrainingConfig) -> LoraConfig | None:
    return training if isinstance(training, LoraConfig) else None


def draft_of(training: TrainingConfig) -> DraftConfig | None:
    return training if isinstance(training, DraftConfig) else None


class OptimizerConfig(Request):
    is_about_results = True

    type: Id = "adamw"
    version: Integer | None = None


class CreateModelRequest(Request):
    """Creates a model. model_role, training, seed, draft and target_path are ours.

    training: null for "lora" if there is a lora_config, and for "full" if there is neither a lora_config nor a draft.
    seed: for full training; LoRA's seed is in lora_config, that of a draft model in draft.
    draft: configures a draft model. target_path: the policy's checkpoint that is the draft's target; null for the bare
    base model.
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
    """Describes the new model. draft, with its defaults filled in, target_path, adapted, not_adapted and warning (see
    GetInfoResponse) are ours."""

    model_id: str
    adapted: dict[str, int] | None = None
    not_adapted: dict[str, int] | None = None
    warning: str | None = None
    draft: DraftConfig | None = None
    target_path: str | None = None
    type: Literal["create_model"] = "create_model"


class GetInfoRequest(Request):
    model_id: Id
    type: Literal["get_info"] = "get_info"


class UnloadModelRequest(Request):
    model_id: Id
    type: Literal["unload_model"] = "unload_model"


class UnloadModelResponse(Wire):
    model_id: str
    type: Literal["unload_model"] = "unload_model"


class ModelData(Wire):
    arch: str | None = None
    model_name: str | None = None
    tokenizer_id: str | None = None


class GetInfoResponse(Wire):
    """Describes a model. num_parameters, lora_alpha, target_modules, adapted, not_adapted, expert_factors, warning,
    max_context_length, model_role, draft and target_path are ours.

    num_parameters: the weights that it trains: those of its adapter, or all of a full model or draft; 0 for a
    reference. Without LoRA, lora_rank and lora_alpha are 0, and target_modules is empty. adapted, not_adapted: by name
    of a linear layer (mlp.up_proj, mlp.experts.up_proj), the number of layers in which the adapter has matrices for it,
    and in which it has none, as for a router. expert_factors: null if it adapts no experts. warning: what train_mlp
    asks for and the adapter lacks, null if nothing. draft: with its defaults filled in. target_path: the draft's
    current target, null for the bare base model.
    """

    model_id: str
    model_data: ModelData
    optimizer_config: OptimizerConfig = OptimizerConfig()
    is_lora: bool
    lora_rank: int
    model_name: str
    num_parameters: int | None = None
    lora_alpha: float
    target_modules: list[str]
    adapted: dict[str, int] | None = None
    not_adapted: dict[str, int] | None = None
    expert_factors: ExpertFactors | None = None
    warning: str | None = None
    max_context_length: int
    model_role: Role
    draft: DraftConfig | None = None
    target_path: str | None = None
    type: Literal["get_info"] = "get_info"


class SupportedModel(Wire):
    """A base model that the server has loaded.

    directory, config_sha256: its files and the SHA-256 of their config.json, reported to clients on the same machine
    alone.
    """

    model_name: str
    max_context_length: int
    trainable: bool = True
    sampleable: bool = True
    directory: str | None = None
    config_sha256: str | None = None


class ServerCapabilities(Wire):
    supported_models: list[SupportedModel]


class Limit(Wire):
    """A limit and its use. limit: null for no limit."""

    limit: int | None
    used: int


class Limits(Wire):
    """Reports a tenant's limits and their use; requests beyond them get 429 with Retry-After.

    tenant: its name, as --tenant-weights takes it. sessions: open ones. queued_operations, queued_bytes: accepted and
    not answered yet, including uploads. tokens_per_minute: of training and sampling; `used` falls with time.
    result_bytes: results on the server's disk. feature_bytes: features captured for drafts. evaluation_bytes: data of
    evaluations. checkpoints, checkpoint_bytes: those that are kept; saving fails beyond. metric_bytes: metrics logged
    for runs; logging is answered 413 beyond. server_queued_bytes, server_feature_bytes: limits of all tenants together;
    `used` is the tenant's own share unless an operator requests it.
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
    evaluation_bytes: Limit | None = None
    checkpoints: Limit | None = None
    checkpoint_bytes: Limit | None = None
    metric_bytes: Limit | None = None

    def without_other_tenants(self) -> "Limits":
        """Returns the limits without the use of other tenants."""
        shares = {"server_queued_bytes": self.queued_bytes, "server_feature_bytes": self.feature_bytes}
        totals = {name: getattr(self, name) for name in shares}
        seen = {name: total.model_copy(update={"used": shares[name].used}) for name, total in totals.items() if total}
        return self.model_copy(update=seen)


class FeatureStock(Wire):
    """Counts the features that are captured for drafts.

    num_bytes: on the server's disk. num_sequences: stored sequences. num_references: references to them. num_held:
    sequences that an unfinished optimizer step needs. num_waiting: captures that are waiting for space. num_put_off:
    captures that were refused after waiting for space, since the server started.
    """

    num_bytes: int
    num_sequences: int
    num_references: int
    num_held: int
    num_waiting: int
    num_put_off: int


class Utilization(Wire):
    """Reports what part of their devices' speed a group's workers use.

    peak_flops: operations per second of a large product in the base model's dtype, on the devices of all its ranks
    together, measured when the model was loaded. training, sampling: the operations that the model needed for recent
    passes or slices, as a part of those that the devices could have done in that time; null before the first, and for
    models that run by transformers' modules.
    """

    peak_flops: float
    training: float | None = None
    sampling: float | None = None


class Workers(Wire):
    """Reports the workers' memory and speed.

    groups: by name of a rank group (the base model's name, "MODEL (critic)", "MODEL (sampler 1)"), without groups that
    are restarting: bytes by purpose on the device and elsewhere, numbers of models by place, and the cost of moving
    them since the start in bytes and milliseconds. utilization: by the same names. features: what is captured for
    drafts.
    """

    groups: dict[str, dict[str, int]]
    utilization: dict[str, Utilization] = Field(default_factory=dict)
    features: FeatureStock | None = None


class CreateSessionRequest(Request):
    tags: Tags = ()
    user_metadata: Metadata | None = None
    sdk_version: Id
    project_id: Id | None = None
    display_name: Text | None = None
    type: Literal["create_session"] = "create_session"


class CreateSessionResponse(Wire):
    """Names the new session. The SDK logs the messages: the address of its page in the console, and what of this client
    the server may not know."""

    session_id: str
    info_message: str | None = None
    warning_message: str | None = None
    type: Literal["create_session"] = "create_session"


class HeartbeatRequest(Request):
    session_id: Id
    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishReason(Request):
    type: Literal["success", "errored", "interrupted"]


class FinishSessionRequest(Request):
    reason: FinishReason
    detail: Detail | None = None


class SessionList(Wire):
    """Lists sessions. names: by id, of those that have a name (ours)."""

    sessions: list[str]
    names: dict[str, str] = Field(default_factory=dict)


class SessionInfo(Wire):
    """Describes a session. Of another tenant's it has only the runs with a public checkpoint."""

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None
    tags: list[str] | None = None


class Cursor(Wire):
    offset: int
    limit: int
    total_count: int


class CheckpointCopy(Wire):
    """Describes a copy of a checkpoint at a mirror. error: why the last attempt failed; the server retries."""

    url: str
    state: Literal["waiting", "copied", "failed"]
    updated_at: datetime
    error: str | None = None


class Checkpoint(Wire):
    """Describes a checkpoint.

    checkpoint_id: `weights/NAME`, `sampler_weights/NAME` or `external_weights/NAME`. copies: null without mirrors.
    """

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
    """Describes a training run. model_role, schedules and display_name, that of its session, are ours; only the owner
    sees the last two."""

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
    schedules: RunSchedules | None = None
    display_name: str | None = None


class TrainingRunList(Wire):
    training_runs: list[TrainingRun]
    cursor: Cursor


class CheckpointList(Wire):
    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class ClientConfig(Wire):
    """Sets flags of the official SDK, which uses its defaults for all others."""

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


class AssignProjectRequest(Request):
    project_id: Id


class TelemetryResponse(Wire):
    status: Literal["accepted"] = "accepted"


class Health(Wire):
    status: Literal["ok"] = "ok"


class Readiness(Wire):
    """Reports whether the server accepts work.

    base_models: by served name, whether the workers are up. runs: number of live runs. runs_to_make_again: runs among
    them whose state has only been on disk since the server started or a worker died; they are rebuilt when they are
    needed or after a long idle time. Both are null unless an operator requests them, and on a server that does no work
    now. holder: for a standby, the URL of the server that it forwards requests to. reason: why the server is
    unavailable.
    """

    status: Literal["ready", "stopping", "standby", "taking over", "unavailable"]
    base_models: dict[str, Literal["up", "restarting"]]
    runs: int | None = None
    runs_to_make_again: int | None = None
    holder: str | None = None
    reason: str | None = None


class TokenizerFiles(Wire):
    """Lists the files of a tokenizer: file name -> URL, to be fetched with the same API key."""

    files: dict[str, str]


class KeyOrganization(Wire):
    name: str


class KeyUser(Wire):
    email: str


class KeyDetails(Wire):
    org_details: KeyOrganization
    user_details: KeyUser


class OwnKey(Wire):
    """Describes the key of the request; `tinker auth login` shows it.

    key_id: 0 on a server that accepts any key. scopes, requests_per_minute: ours; null for no limit.
    """

    key_id: int
    name: str
    note: str
    details: KeyDetails
    scopes: list[str]
    requests_per_minute: int | None


class TokenResponse(Wire):
    jwt: str
