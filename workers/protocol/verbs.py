"""What crosses between the dispatch and the ranks: the arguments and results of a worker's verbs. Imports no torch."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ...schemas.errors import Category, OperationError
from ...schemas.models import LoraConfig, TrainingConfig
from ...schemas.sampling import SamplingParams, TopkLogprobs
from ...schemas.training import AdamParams, ForwardBackwardRequest


@dataclass(frozen=True)
class ModelInfo:
    """A loaded base model. eos_token_ids: what ends a sample when the request names no stop."""

    name: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_context_length: int
    num_parameters: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class RunSpec:
    """A run to create: what of it is trained, with the seed already drawn. role: which of the programs it is. is_new:
    whether somebody asks for it now, and can ask for something else. base_name: what its files call the base model;
    None = the worker's name of it."""

    run_id: str
    training: TrainingConfig
    role: str = "policy"
    is_new: bool = False
    base_name: str | None = None


@dataclass(frozen=True)
class RunInfo:
    """training: with all that its request has left open. feature_bytes: of a draft, what is captured of a token.
    target_modules, not_adapted: of an adapter, the names of the layers with matrices that it adapts, and of others."""

    num_parameters: int
    target_modules: tuple[str, ...]
    training: TrainingConfig
    feature_bytes: int = 0
    not_adapted: tuple[str, ...] = ()

    @property
    def num_adapted(self) -> dict[str, int] | None:
        """Returns how many layers of each name are adapted, such as mlp.up_proj; None of what is no adapter."""
        return _by_kind(self.target_modules) if isinstance(self.training, LoraConfig) else None

    @property
    def num_not_adapted(self) -> dict[str, int] | None:
        """As num_adapted, of the other layers that have matrices."""
        return _by_kind(self.not_adapted) if isinstance(self.training, LoraConfig) else None


def _by_kind(names: Iterable[str]) -> dict[str, int]:
    """names: of which each says in which layer it is, model.layers.0.mlp.up_proj."""
    return dict(Counter(re.sub(r"^.*?\.\d+\.", "", name) for name in names))


@dataclass(frozen=True, eq=False)
class AdapterWeights:
    """A model on its way to other workers of the same base model. weights: float32 [P], in the order of its layout."""

    training: TrainingConfig
    weights: np.ndarray


# What is saved of a run: its weights; what the optimizer needs, too; or all, pending gradients included.
Contents = Literal["weights", "state", "all"]


class WorkerLost(OperationError):
    """The worker died before the operation was answered: its effect is unknown, and what only the worker had is gone.

    alone: the operation ran and nothing else did, neither another one in the same call nor a slice.
    """

    def __init__(self, message: str, alone: bool = False) -> None:
        super().__init__(message, "server")
        self.alone = alone


@dataclass(frozen=True)
class Failure:
    """An item of a verb failed; the others of the same call are as if it had not been there."""

    message: str
    category: Category


@dataclass(frozen=True)
class Share:
    """What a rank has of a part's data. numbers: in the whole operation. num_data: of all ranks together."""

    numbers: Sequence[int]
    num_data: int


@dataclass(frozen=True)
class Part:
    """What one pass runs of an operation: all of it, or as much of a large one as the pass has room for.

    operation_id: the same in all parts of an operation, and never used again. request: its data are this part's,
    the first of them number `first_datum` of the whole. last: no part comes after this one. shared: the request has
    only this rank's share of the data.
    """

    operation_id: int
    request: ForwardBackwardRequest
    first_datum: int = 0
    last: bool = True
    shared: Share | None = None

    @property
    def share(self) -> Share:
        num_data = len(self.request.data)
        return self.shared or Share(range(self.first_datum, self.first_datum + num_data), num_data)


@dataclass(frozen=True)
class Pass:
    """Forward (and backward) of several runs' operations, in the order of each run.

    Each part is answered by a Failure, which ends its operation (no more parts of it come); by None, when more parts
    come; or by the ForwardBackwardOutput of the whole operation, of a shared one by a SharedOutput. An operation's
    gradients reach its run's accumulator with its last part, and only if all of them succeeded.
    """

    parts: tuple[Part, ...]


@dataclass(frozen=True, eq=False)
class SharedOutput:
    """A rank's outputs of an operation, by number of the datum. metrics: those of all ranks."""

    outputs: Mapping[int, Mapping[str, np.ndarray]]
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Step:
    """One optimizer step of one run; answered by its metrics (name -> value) or a Failure.

    refused: why its gradients are incomplete, where the rank may not know: they are then discarded and nothing else.
    seq_id: its place among the operations of its run, 0 = unknown.
    """

    run_id: str
    params: AdamParams
    gradient_scale: float | Literal["mean"] | None = None
    refused: str | None = None
    seq_id: int = 0


@dataclass(frozen=True, eq=False)
class SampleJob:
    """One sampling request.

    adapter_id: a sampler adapter (see Worker.copy_adapter, load_adapter), None = the bare base model.
    prompt: int32 [T]. params.seed is already drawn; seed_is_drawn: whether nobody asked for this one.
    target_prompt_tokens: int64 [T - 1, K], -1 = nothing. stop: token ids that end a sample, and strings (matched over
    token borders); both empty = max_tokens alone. streams: whether what each slice adds is told as it comes. owner:
    whose it is; nobody is told by prompt_cache_hit_tokens what others have sent. draft_id: a draft (see
    Worker.load_adapter) whose guesses are tried, num_draft_tokens at a time, None = as many as it usually does.
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
    owner: str = ""
    draft_id: str | None = None
    num_draft_tokens: int | None = None
    seed_is_drawn: bool = False


@dataclass(frozen=True, eq=False)
class SampledPart:
    """What a slice added to sample number `sample` of a job: tokens int32 [n], logprobs float32 [n], n at least 1.

    stop_reason: as in SampledSequence, None while the sample goes on.
    """

    sample: int
    tokens: np.ndarray
    logprobs: np.ndarray
    topk_logprobs: TopkLogprobs | None = None
    stop_reason: Literal["stop", "length"] | None = None


@dataclass(frozen=True)
class Slice:
    """A burst of decoding of at most about `budget_milliseconds`; requests join and leave at its borders.

    cohort: whose it is. Those that join are in it until they end; those of other cohorts stay as they are meanwhile.
    Answered by SliceResult.
    """

    join: tuple[SampleJob, ...]
    cancel: tuple[str, ...]
    budget_milliseconds: float
    cohort: int = 0


@dataclass(frozen=True)
class SliceResult:
    """finished: job_id -> SampleResponse or Failure. num_active: jobs of the cohort still waiting or decoding.

    progress: job_id -> what was added to the samples of those that stream and go on; the answer has all of it again.
    """

    finished: dict
    num_active: int
    progress: dict[str, tuple[SampledPart, ...]] = field(default_factory=dict)
