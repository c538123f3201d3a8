"""Messages that save, load, publish and download checkpoints."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from .bounds import Id, Metadata, Path, StringMetadata, Text, TtlSeconds
from .models import LoraConfig, OptimizerConfig, Role
from .training import Natural, Request, SeqId, Wire

SamplerKind = Literal["snapshot", "inflight"]


class SaveWeightsRequest(Request):
    model_id: Id
    path: Path
    seq_id: SeqId = 0
    overwrite: bool = False
    ttl_seconds: TtlSeconds | None = None
    user_metadata: StringMetadata | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsResponse(Wire):
    path: str
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsForSamplerRequest(Request):
    """Saves weights for sampling.

    With `path` it creates a named, listed checkpoint; without, an ephemeral sampler, and the response has its
    `sampling_session_id`.
    """

    model_id: Id
    seq_id: SeqId = 0
    path: Path | None = None
    sampling_session_seq_id: Natural | None = None
    kind: SamplerKind = "snapshot"
    ttl_seconds: TtlSeconds | None = None
    user_metadata: StringMetadata | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsForSamplerResponse(Wire):
    path: str | None = None
    sampling_session_id: str | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsExternalRequest(Request):
    """Saves weights for use outside of the server.

    age_encryption_recipients: public keys to which every file is encrypted; file names then end in `.age`.
    """

    model_id: Id
    path: Path
    seq_id: SeqId = 0
    ttl_seconds: TtlSeconds | None = None
    age_encryption_recipients: Annotated[list[Text], Field(max_length=10)] | None = None
    type: Literal["save_weights_external"] = "save_weights_external"


class SaveWeightsExternalResponse(Wire):
    path: str
    size_bytes: int | None = None
    type: Literal["save_weights_external"] = "save_weights_external"


class LoadWeightsRequest(Request):
    """Loads a checkpoint into a live model (model_id, seq_id), or creates a model from it (session_id, model_seq_id).

    model_role (ours): the role of the created model; null for the role of the model that saved the checkpoint.
    """

    path: Path
    optimizer: bool = False
    model_id: Id | None = None
    seq_id: SeqId | None = None
    session_id: Id | None = None
    model_seq_id: Natural | None = None
    base_model: Path | None = None
    user_metadata: Metadata | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: Text | None = None
    model_role: Role | None = None
    type: Literal["load_weights"] = "load_weights"


class LoadWeightsResponse(Wire):
    path: str | None = None
    model_id: str | None = None
    type: Literal["load_weights"] = "load_weights"


class WeightsInfoRequest(Request):
    tinker_path: Path


class WeightsInfoResponse(Wire):
    """Describes a checkpoint. model_role is ours."""

    base_model: str
    is_lora: bool
    optimizer_config: OptimizerConfig = OptimizerConfig()
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None
    model_role: Role = "policy"


class CopyWeightsRequest(Request):
    source_path: Path
    destination_project_id: Id | None = None
    session_id: Id | None = None
    model_seq_id: Natural | None = None
    ttl_seconds: TtlSeconds | None = None
    weights_access_token: Text | None = None


class CopyWeightsResponse(Wire):
    tinker_path: str


class ImportWeightsResponse(Wire):
    """Describes an imported adapter.

    tinker_path: the new checkpoint, which has no optimizer state. lora: its configuration, by whole groups of layers.
    """

    tinker_path: str
    base_model: str
    lora: LoraConfig


class TtlRequest(Request):
    ttl_seconds: TtlSeconds | None = None


class ArchiveUrl(Wire):
    """A signed URL of a tar archive with the checkpoint's files. It needs no key until it expires."""

    url: str
    expires: datetime


class ExternalWeightsUrls(Wire):
    urls: dict[str, str]
    expires: datetime
