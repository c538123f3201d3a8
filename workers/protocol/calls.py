"""Defines the arguments and results of a worker's methods, as the dispatch and the ranks exchange them. Imports no
torch.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ...schemas.errors import Category, OperationError
from ...schemas.models import ExpertFactors, LoraConfig, TrainingConfig
from ...schemas.sampling import SamplingParams, TopkLogprobs
from ...schemas.training import AdamParams, ForwardBackwardOutput, ForwardBackwardRequest
from .worker_config import DEFAULT_MICRO_BATCH_TOKENS


@dataclass(frozen=True)
class ModelInfo:
    """Describes a loaded base model.

    eos_token_ids: tokens that end a sample, unless the request wants no stops at all.
    config_eos_token_ids: the end tokens of config.json, which are others if generation_config.json names its own.
    micro_batch_tokens: most tokens of one micro-batch.
    """

    name: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_context_length: int
    num_parameters: int
    eos_token_ids: tuple[int, ...]
    micro_batch_tokens: int = DEFAULT_MICRO_BATCH_TOKENS
    config_eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class AdapterFile:
    """An adapter_model.safetensors of peft, and what its adapter_config.json says of the layout of experts.

    peft_version: of the peft that saved it, None if it does not say.
    parameters: `target_parameters`.
    """

    path: str
    peft_version: str | None = None
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunSpec:
    """Specifies a run to create.

    training: what is trained, with the seed already drawn.
    role: the program that the run uses, such as policy or critic.
    is_new: true if a user is creating it now and can choose other settings if these fail.
    base_name: name of the base model in the run's files; None means the worker's name for it.
    """

    run_id: str
    training: TrainingConfig
    role: str = "policy"
    is_new: bool = False
    base_name: str | None = None


@dataclass(frozen=True)
class RunInfo:
    """Describes a run that was created.

    num_parameters: the weights that it trains, on all ranks; 0 for a reference.
    training: with every default that the request left open filled in.
    feature_bytes: for a draft run, bytes of captured features per token.
    target_modules, not_adapted: for an adapter, names of the layers with matrices that it adapts, and of the others.
    frozen_experts: names of experts that train_mlp leaves as they are, because adapters do not support them.
    """

    num_parameters: int
    target_modules: tuple[str, ...]
    training: TrainingConfig
    feature_bytes: int = 0
    not_adapted: tuple[str, ...] = ()
    frozen_experts: tuple[str, ...] = ()

    @property
    def expert_factors(self) -> ExpertFactors | None:
        """Returns how the adapter adapts experts; None if it adapts none."""
        if not isinstance(self.training, LoraConfig) or not any(".experts." in name for name in self.target_modules):
            return None
        return self.training.expert_factors or "each"

    @property
    def warning(self) -> str | None:
        """Returns what a user should know about the adapter, None if it adapts all that was asked for."""
        if not self.frozen_experts:
            return None
        counts = ", ".join(f"{kind} in {number} layers" for kind, number in _by_kind(self.frozen_experts).items())
        return f"train_mlp leaves experts as they are ({counts}): adapters do not support those of this base model"

    @property
    def num_adapted(self) -> dict[str, int] | None:
        """Returns the number of adapted layers by kind, such as mlp.up_proj; None if the run is not an adapter."""
        return _by_kind(self.target_modules) if isinstance(self.training, LoraConfig) else None

    @property
    def num_not_adapted(self) -> dict[str, int] | None:
        """Returns the same counts for the layers with matrices that are not adapted."""
        return _by_kind(self.not_adapted) if isinstance(self.training, LoraConfig) else None


def _by_kind(names: Iterable[str]) -> dict[str, int]:
    """Counts layer names such as model.layers.0.mlp.up_proj by what follows the layer's number."""
    return dict(Counter(re.sub(r"^.*?\.\d+\.", "", name) for name in names))


@dataclass(frozen=True, eq=False)
class AdapterWeights:
    """Carries trained weights to other workers of the same base model.

    weights: float32 [P], in the order of the run's flat parameters.
    """

    training: TrainingConfig
    weights: np.ndarray


# The part of a run that is saved: weights; weights and optimizer state; or both and pending gradients.
SavedContents = Literal["weights", "state", "all"]


class WorkerLost(OperationError):
    """The worker died before it got or answered the operation: the effect is unknown, and what only it held is gone.

    alone: true if nothing else ran at the time: no operation, sampling job or snapshot; then it is a strike.
    """

    def __init__(self, message: str, alone: bool = False) -> None:
        super().__init__(message, "server")
        self.alone = alone


@dataclass(frozen=True)
class Failure:
    """Answers an item that failed; the other items of the same call are unaffected."""

    message: str
    category: Category

    @staticmethod
    def of(error: Exception) -> "Failure":
        """Returns the answer for an error; one that was not foreseen is named by its type."""
        if isinstance(error, OperationError):
            return Failure(error.message, error.category)
        return Failure(f"{type(error).__name__}: {error}", "server")

    def error(self) -> OperationError:
        return OperationError(self.message, self.category)


@dataclass(frozen=True)
class DataShare:
    """A rank's share of a part's data."""

    indices: Sequence[int]
    """The index of each datum in the whole operation."""
    num_data: int
    """Over all ranks."""


@dataclass(frozen=True)
class OperationPart:
    """The part of an operation that runs in one pass: all of it, or a chunk of a large one."""

    work_number: int
    """The same in all parts of an operation, and never reused."""
    request: ForwardBackwardRequest
    """Holds this part's data only."""
    first_datum: int = 0
    """Index of the first of them in the whole operation."""
    last: bool = True
    """True for the operation's final part."""
    rank_share: DataShare | None = None
    """Set if the request holds one rank's share of the data, None if all ranks get all of them."""

    @property
    def data_share(self) -> DataShare:
        """The part of the operation's data that the request holds."""
        num_data = len(self.request.data)
        return self.rank_share or DataShare(range(self.first_datum, self.first_datum + num_data), num_data)


Pass = tuple[OperationPart, ...]
"""A joint forward (and backward) of operations of several runs, in each run's order.

Each part is answered by a Failure, which ends its operation (no more parts follow); by None while more parts follow; or
by the ForwardBackwardOutput of the whole operation (RankOutput if it has a rank's share of the data). An operation's
gradients reach its run's accumulator with its last part, and only if all parts succeeded.
"""


@dataclass(frozen=True, eq=False)
class RankOutput:
    """A rank's outputs of an operation, by index of the datum; `metrics` cover all ranks."""

    outputs: Mapping[int, Mapping[str, np.ndarray]]
    metrics: Mapping[str, float]


PartAnswer = ForwardBackwardOutput | RankOutput | Failure | None
"""Answers an OperationPart, see Pass."""


@dataclass(frozen=True)
class OptimizerStep:
    """One optimizer step of one run; answered by its metrics (name -> value) or a Failure.

    refusal_reason: why the gradients are incomplete, if the rank may not know; the step then only discards them.
    seq_id: number of the operation in its run; 0 means unknown.
    """

    run_id: str
    params: AdamParams
    gradient_scale: float | Literal["mean"] | None = None
    refusal_reason: str | None = None
    seq_id: int = 0


@dataclass(frozen=True, eq=False)
class SampleJob:
    """One sampling request, which the server has checked against the model.

    adapter_id: a sampler adapter (see Worker.copy_adapter, load_adapter); None means the bare base model.
    prompt: int32 [T].
    params: with a seed, drawn if the user gave none (`seed_is_drawn`), and with max_tokens, the rest of the context if
        the user gave none (`fills_context`).
    target_prompt_tokens: int64 [T - 1, K]; -1 means none.
    stop_token_ids, stop_strings: what ends a sample (strings match across token boundaries); if both are empty, only
        max_tokens does.
    streams: true if each slice reports the tokens that it added.
    tenant_id: the tenant; prompt_cache_hit_tokens never reveals what other tenants have sent.
    draft_id: a draft model (see Worker.load_draft) that proposes num_draft_tokens at a time; None means its default
        number.
    compile_seconds: processor time that its constraint took to compile when it was tried.
    """

    job_id: str
    adapter_id: str | None
    prompt: np.ndarray
    params: SamplingParams
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    num_samples: int = 1
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_tokens: np.ndarray | None = None
    prompt_alt_tokens_k: int = 0
    streams: bool = False
    tenant_id: str = ""
    draft_id: str | None = None
    num_draft_tokens: int | None = None
    seed_is_drawn: bool = False
    fills_context: bool = False
    compile_seconds: float = 0.0

    @property
    def seed(self) -> int:
        assert self.params.seed is not None
        return self.params.seed

    @property
    def max_tokens(self) -> int:
        assert self.params.max_tokens is not None
        return self.params.max_tokens

    @property
    def most_tokens(self) -> int:
        """Upper bound on its tokens: the prompt's, and those of all samples."""
        return len(self.prompt) + self.num_samples * self.max_tokens


@dataclass(frozen=True, eq=False)
class SampledPart:
    """The tokens that a slice added to sample number `sample` of a job.

    tokens, logprobs: int32 [n] and float32 [n], n at least 1.
    stop_reason: as in SampledSequence; None while the sample continues.
    """

    sample: int
    tokens: np.ndarray
    logprobs: np.ndarray
    topk_logprobs: TopkLogprobs | None = None
    stop_reason: Literal["stop", "length"] | None = None


@dataclass(frozen=True)
class SamplingSlice:
    """A burst of decoding that lasts about `budget_milliseconds` at most; requests join and leave between slices.

    Answered by SliceResult.

    cohort: the jobs that run. A joining job belongs to this cohort until it ends; jobs of other cohorts are paused.
    """

    join: tuple[SampleJob, ...]
    cancel: tuple[str, ...]
    budget_milliseconds: float
    cohort: int = 0


@dataclass(frozen=True)
class SliceResult:
    """Reports what a slice did.

    finished: job_id -> SampleResponse or Failure.
    num_active: jobs of the cohort still waiting or decoding.
    progress: job_id -> tokens added to streaming jobs that continue; the final answer repeats all of them.
    """

    finished: dict
    num_active: int
    progress: dict[str, tuple[SampledPart, ...]] = field(default_factory=dict)
