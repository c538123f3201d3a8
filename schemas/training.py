"""Training: data, the two verbs that train, and what they answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field


@dataclass(frozen=True, slots=True)
class ProvenanceSpan:
    """A run of consecutive positions of a datum that repeats a run of an earlier sampling request.

    `kind` says of what: "prompt", the prompt given to the sampler, or "sampled", the tokens that it drew.
    """

    kind: Literal["prompt", "sampled"]
    sequence_id: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Datum:
    """One training sequence. Position i of the targets is predicted from `tokens[: i + 1]` (the client shifts).

    tokens: int32 [T].
    loss_fn_inputs: name -> dense array; `target_tokens` int64 [T] or [T, K], the others float32 of the shape that the
        loss asks for (see workers/losses).
    *_spans: tilings of the positions of `tokens` and of `target_tokens`; empty when the client gave none.
    """

    tokens: np.ndarray
    loss_fn_inputs: Mapping[str, np.ndarray] = field(default_factory=dict)
    model_input_spans: tuple[ProvenanceSpan, ...] = ()
    loss_fn_input_spans: tuple[ProvenanceSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class ForwardBackwardRequest:
    """Losses are sums over tokens and datums; gradients accumulate until `optim_step`.

    loss_weight: multiplies the loss (ours; not on the SDK's wire).
    forward_only: same outputs, no gradient.
    """

    model_id: str
    seq_id: int
    data: tuple[Datum, ...]
    loss_fn: str
    loss_fn_config: Mapping[str, float | str] = field(default_factory=dict)
    forward_only: bool = False
    loss_weight: float = 1.0


@dataclass(frozen=True, slots=True)
class ForwardBackwardOutput:
    """loss_fn_outputs: per datum name -> array (`logprobs` float32 of the shape of `target_tokens`).

    metrics: every key is `name:reduction`, exactly one colon; `loss:sum` always (protocol rule 5).
    """

    loss_fn_outputs: tuple[Mapping[str, np.ndarray], ...]
    metrics: Mapping[str, float]
    loss_fn_output_type: str = "scalar"


class Wire(BaseModel):
    """Base of the JSON bodies: frozen, unknown keys ignored, fields named model_* allowed."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())


class AdamParams(Wire):
    """One step of AdamW as torch defines it. grad_clip_norm: global norm over the adapter, 0 = off."""

    learning_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


SeqId = Annotated[int, Field(ge=0)]
"""Number of an operation of its run, from 1; 0 (ours) lets the server give it the next one."""


class OptimStepRequest(Wire):
    """gradient_scale (ours): nothing, "mean" = one over the window's summed weights, or a number."""

    model_id: str
    seq_id: SeqId = 0
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, float | int | str] | None = None
    gradient_scale: float | Literal["mean"] | None = None
    type: Literal["optim_step"] = "optim_step"


class OptimStepResponse(Wire):
    metrics: dict[str, float] | None = None
    type: Literal["optim_step"] = "optim_step"
