"""Optimizer steps of several models in one call, over their flat vectors: check, scale, clip, fused AdamW."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ...schemas.errors import OperationError
from ...schemas.training import AdamParams
from ..parallel.mesh import Mesh, Team
from ..protocol.calls import Failure, OptimizerStep
from ..resources.memory import reporting_out_of_memory
from .gradients import GradientWindow
from .moments import EightBitMoments
from .trainable import Trainable

_NORM_PART = 1 << 14


@dataclass(eq=False)
class PendingStep:
    """An optimizer step in progress.

    scale: factor of the gradient. norm: of the scaled gradient, before clipping.
    """

    model: Trainable
    params: AdamParams
    scale: float
    norm: float = math.nan

    @property
    def gradient(self) -> Tensor:
        return self.model.gradients.accumulator

    @property
    def clip_coefficient(self) -> float:
        """The clipping factor of torch.nn.utils.clip_grad_norm_; a grad_clip_norm of 0 turns it off."""
        max_norm = self.params.grad_clip_norm
        return min(1.0, max_norm / (self.norm + 1e-6)) if max_norm else 1.0

    def metrics(self) -> dict[str, float]:
        """Returns the step's metrics.

        None has a name that loggers use (`step`, `num_tokens`, `time`), because scripts merge these into their own.
        """
        window = self.model.gradients.window
        return window.losses | {
            "unclipped_grad_l2:mean": self.norm,
            "grad_clipped:mean": float(self.clip_coefficient < 1.0),
            "optimizer_step:last": float(self.model.num_steps),
            "window_tokens:sum": float(window.num_tokens),
        }


def apply_steps(
    models: Sequence[Trainable], steps: Sequence[OptimizerStep], mesh: Mesh | None = None
) -> list[dict[str, float] | Failure]:
    """Makes a step of each model; all are on the device, and none is given twice.

    Each step gives the same numbers as alone. All ranks of a mesh call it together, and sum their gradients first.

    Consumes the windows. Returns the loss sums and the metrics of `PendingStep.metrics`, with the norm of the scaled
    gradient. A Failure leaves the weights untouched. It is returned for a window that is empty, lost an operation or
    overflowed (the window is then cleared), for an unusable gradient_scale or eps, and if there is no memory for the
    optimizer state (the window is then kept).
    """
    mesh = mesh or Mesh()
    checked = [_check(model, step) for model, step in zip(models, steps, strict=True)]
    failures = mesh.first_values([each if isinstance(each, Failure) else None for each in checked])
    checked = [failure or each for failure, each in zip(failures, checked, strict=True)]  # alike on all ranks
    updates = [each for each in checked if isinstance(each, PendingStep)]
    all_reduce_gradients([update.model for update in updates], mesh)
    _multiply([update.gradient for update in updates], [update.scale for update in updates])
    for update, norm in zip(updates, _norms([update.model for update in updates], mesh), strict=True):
        update.norm = norm
    finite = [update for update in updates if math.isfinite(update.norm)]
    _multiply([update.gradient for update in finite], [update.clip_coefficient for update in finite])
    _adamw(finite)
    return [_result(each) if isinstance(each, PendingStep) else each for each in checked]


def all_reduce_gradients(models: Sequence[Trainable], mesh: Mesh) -> None:
    """Sums the accumulated gradients over all ranks that have the same part of a matrix, with one exchange per region.

    Gradients that ranks keep parts of are summed already.
    """
    models = [model for model in models if model.zero is None]
    if mesh.is_single or not models:
        return
    if mesh.along("tp").index > 0:
        for model in models:
            for repeated in model.layout.replicated:
                model.gradients.accumulator[repeated].zero_()
    for axes in _axes(models):
        team, regions = mesh.across(*axes), [_region(model, axes) for model in models]
        if team.size > 1:
            _add_up_regions(regions, team)


def _add_up_regions(regions: Sequence[Tensor], team: Team) -> None:
    """Sums the regions over the team.

    A single one, which may be as large as all weights of a model, is summed in place.
    """
    if len(regions) == 1:
        team.all_reduce(regions[0])
        return
    whole = team.all_reduce(torch.cat(list(regions)))
    for region, summed in zip(regions, whole.split([len(region) for region in regions]), strict=True):
        region.copy_(summed)


def keep_on_first_rank(model: Trainable, mesh: Mesh) -> None:
    """Clears accumulated gradients that several ranks have alike, except on the first of them.

    `all_reduce_gradients` then counts them once.
    """
    if not model.gradients.window.num_operations or model.zero is not None:
        return
    for axes in _axes([model]):
        if mesh.across(*axes).index > 0:
            _region(model, axes).zero_()


def _norms(models: Sequence[Trainable], mesh: Mesh) -> list[float]:
    in_parts = [model.zero.norm(model.gradients.accumulator) for model in models if model.zero is not None]
    if in_parts:
        assert len(in_parts) == len(models), "a model whose gradients are sharded over ranks steps alone"
        return in_parts
    if mesh.is_single or not models:
        return global_norms([model.gradients.accumulator for model in models])
    squares = torch.zeros(len(models), dtype=torch.float64)
    for axes in _axes(models):
        own = global_norms([_region(model, axes) for model in models])
        squares += mesh.along(*axes).all_reduce(torch.tensor(own, dtype=torch.float64).square())
    return squares.sqrt().tolist()


def _axes(models: Sequence[Trainable]) -> list[tuple[str, ...]]:
    return sorted({axes for model in models for axes in model.layout.regions})


def _region(model: Trainable, axes: tuple[str, ...]) -> Tensor:
    """Returns the accumulated gradients that ranks along these axes have parts of; may be empty."""
    return model.gradients.accumulator[model.layout.regions.get(axes, slice(0, 0))]


def refuse_window(model: Trainable, step: OptimizerStep) -> None:
    """Marks the window as incomplete if the step says that it lost an operation, even if the step then fails."""
    model.gradients.window.refused = model.gradients.window.refused or step.refusal_reason


def _check(model: Trainable, step: OptimizerStep) -> PendingStep | Failure:
    refuse_window(model, step)
    try:
        _refuse_unusable_window(model)
        if step.params.eps < (tiny := torch.finfo(torch.float32).tiny):
            raise OperationError(f"eps {step.params.eps} is zero in float32, where 0 / 0 is NaN: use at least {tiny}")
        scale = _gradient_scale(model.gradients.window, step.gradient_scale)
        _allocate_moments(model)
    except OperationError as error:
        return Failure.of(error)
    return PendingStep(model, step.params, scale)


def _refuse_unusable_window(model: Trainable) -> None:
    refused = model.gradients.window.refused
    if refused is not None:
        model.gradients.clear_window()
        raise OperationError(
            f"a forward_backward since the last step was refused ({refused}), so the gradients are incomplete; the"
            " weights are unchanged and the gradients are discarded: send the whole batch again"
        )
    if not model.gradients.window.num_operations:
        raise OperationError("no gradients since the last step: call forward_backward first")


def _gradient_scale(window: GradientWindow, wanted: float | Literal["mean"] | None) -> float:
    if wanted is None:
        return 1.0
    scale = wanted
    if scale == "mean":
        if not window.weight_sum:
            raise OperationError('gradient_scale "mean" divides by the summed weights of the window, which are 0')
        scale = 1.0 / window.weight_sum
    if not math.isfinite(scale):
        raise OperationError(f"gradient_scale {scale} is not a finite number")
    return scale


def _allocate_moments(model: Trainable) -> None:
    """Allocates the moments before anything is changed, the gradient included."""
    remedy = (
        "gradients are kept: step again when other runs have ended, or serve with fewer --adapter-slots, --full-slots"
    )
    with reporting_out_of_memory(f"the optimizer state of {model.layout.num_weights} parameters", remedy):
        _ = model.exp_avg, model.exp_avg_sq


def global_norms(gradients: Sequence[Tensor]) -> list[float]:
    """Returns the norms of vectors, each computed in parts.

    A single float32 sum over millions of squares is wrong in the third digit.
    """
    if not gradients:
        return []
    if gradients[0].is_cuda:
        # The kernel sums parts of 65536 elements, and within these by threads.
        return torch.stack(torch.ops.aten._foreach_norm.Scalar(list(gradients))).tolist()
    return [_norm_in_parts(gradient) for gradient in gradients]


def _norm_in_parts(gradient: Tensor) -> float:
    in_parts = len(gradient) - len(gradient) % _NORM_PART
    parts = gradient[:in_parts].view(-1, _NORM_PART).norm(dim=1)
    return float(torch.cat([parts, gradient[in_parts:].norm()[None]]).norm())


def _multiply(vectors: Sequence[Tensor], factors: Sequence[float]) -> None:
    wanted = [(vector, factor) for vector, factor in zip(vectors, factors, strict=True) if factor != 1.0]
    if wanted:
        torch.ops.aten._foreach_mul_.ScalarList([vector for vector, _ in wanted], [factor for _, factor in wanted])


def _adamw(updates: Sequence[PendingStep]) -> None:
    """Makes the steps of torch.optim.AdamW, fused: one call for all steps with equal hyperparameters.

    Loshchilov and Hutter, https://arxiv.org/abs/1711.05101.
    """
    for update in updates:
        update.model.num_steps += 1

    def hyper_parameters(update: PendingStep) -> tuple[float, ...]:
        params = update.params
        return params.learning_rate, params.beta1, params.beta2, params.weight_decay, params.eps

    for key, group in groupby(sorted(updates, key=hyper_parameters), key=hyper_parameters):
        named = dict(zip(("lr", "beta1", "beta2", "weight_decay", "eps"), key, strict=True))
        _step_together([update.model for update in group], **named)


def _step_together(models: Sequence[Trainable], **hyper_parameters: float) -> None:
    in_float32 = []
    for model in models:
        if isinstance(model.moments, EightBitMoments):
            vectors = model.local_weights, model.gradients.accumulator, model.exp_avg, model.exp_avg_sq
            model.moments.step(*vectors, model.num_steps, **hyper_parameters)
            increment_version([model.weights, model.exp_avg, model.exp_avg_sq])
        else:
            in_float32.append(model)
    if in_float32:
        _fused_adamw(in_float32, **hyper_parameters)
    for model in models:
        model.gather_weights()


def _fused_adamw(models: Sequence[Trainable], **hyper_parameters: float) -> None:
    weights = [model.local_weights for model in models]
    exp_avgs = [model.exp_avg for model in models]
    exp_avg_sqs = [model.exp_avg_sq for model in models]
    num_steps = torch.tensor([float(model.num_steps) for model in models], device=weights[0].device)
    torch.ops.aten._fused_adamw_.default(
        weights,
        [model.gradients.accumulator for model in models],
        exp_avgs,
        exp_avg_sqs,
        [],
        list(num_steps.unbind()),
        amsgrad=False,
        maximize=False,
        **hyper_parameters,
    )
    # The fused call does not bump the versions of the tensors that it changes.
    increment_version([*weights, *exp_avgs, *exp_avg_sqs])


def _result(update: PendingStep) -> dict[str, float] | Failure:
    metrics = update.metrics()
    update.model.gradients.clear_window()
    if math.isfinite(update.norm):
        return metrics
    return Failure(
        f"the accumulated gradient is not finite (norm {update.norm}); the weights are unchanged and the gradients are"
        " discarded: send the batch again, with smaller losses or weights",
        "user",
    )
