"""One optimizer step of one adapter, over its flat vectors: check, scale, clip, AdamW."""

import math
from typing import Literal

import torch
from torch import Tensor

from ..schemas.errors import OperationError
from ..schemas.training import AdamParams
from .lora import Adapter, Window
from .verbs import Step

_NORM_PART = 1 << 14


def apply_step(adapter: Adapter, step: Step) -> dict[str, float]:
    """Consumes the window; returns grad_norm (scaled, before clipping), clipped, lr, step, num_tokens and loss sums.

    Raises OperationError, the weights untouched: on a window that is empty or that lost an operation or overflowed
    (the window is then cleared), and on a gradient_scale or eps that is no use (the window then stays).
    """
    _refuse_unusable_window(adapter)
    _refuse_vanishing_eps(step.params)
    scale = _gradient_scale(adapter.window, step.gradient_scale)
    gradient = adapter.accumulator.mul_(scale) if scale != 1.0 else adapter.accumulator
    norm = global_norm(gradient)
    if not math.isfinite(norm):
        adapter.clear_window()
        raise OperationError(
            f"the accumulated gradient is not finite (norm {norm}); the weights are unchanged and the gradients are"
            " discarded: send the batch again, with smaller losses or weights"
        )
    clipped = _clip(gradient, norm, step.params.grad_clip_norm)
    _adamw(adapter, gradient, step.params)
    metrics = _metrics(adapter, step.params, norm, clipped)
    adapter.clear_window()
    return metrics


def _refuse_unusable_window(adapter: Adapter) -> None:
    refused = adapter.window.refused
    if refused is not None:
        adapter.clear_window()
        raise OperationError(
            f"a forward_backward since the last step was refused ({refused}), so the gradients are incomplete; the"
            " weights are unchanged and the gradients are discarded: send the whole batch again"
        )
    if not adapter.window.num_operations:
        raise OperationError("no gradients since the last step: call forward_backward first")


def _refuse_vanishing_eps(params: AdamParams) -> None:
    tiny = torch.finfo(torch.float32).tiny
    if params.eps < tiny:
        raise OperationError(f"eps {params.eps} is zero in float32, where 0 / 0 is NaN: use at least {tiny}")


def _gradient_scale(window: Window, wanted: float | Literal["mean"] | None) -> float:
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


def global_norm(gradient: Tensor) -> float:
    """Of a vector, in parts: one float32 sum over millions of squares is wrong in the third digit."""
    in_parts = len(gradient) - len(gradient) % _NORM_PART
    parts = gradient[:in_parts].view(-1, _NORM_PART).norm(dim=1)
    return float(torch.cat([parts, gradient[in_parts:].norm()[None]]).norm())


def _clip(gradient: Tensor, norm: float, max_norm: float) -> bool:
    """As torch.nn.utils.clip_grad_norm_; 0 = off."""
    coefficient = max_norm / (norm + 1e-6)
    if not max_norm or coefficient >= 1.0:
        return False
    gradient.mul_(coefficient)
    return True


def _adamw(adapter: Adapter, gradient: Tensor, params: AdamParams) -> None:
    """torch.optim.AdamW in its order of operations: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101."""
    adapter.num_steps += 1
    adapter.exp_avg.lerp_(gradient, 1 - params.beta1)
    adapter.exp_avg_sq.mul_(params.beta2).addcmul_(gradient, gradient, value=1 - params.beta2)
    if not params.learning_rate:
        return
    first_correction = 1 - params.beta1**adapter.num_steps
    second_correction = 1 - params.beta2**adapter.num_steps
    # Between operations scratch is free, so the denominator needs no memory of its own.
    denominator = torch.sqrt(adapter.exp_avg_sq, out=adapter.scratch)
    denominator.div_(math.sqrt(second_correction)).add_(params.eps)
    adapter.weights.mul_(1 - params.learning_rate * params.weight_decay)
    adapter.weights.addcdiv_(adapter.exp_avg, denominator, value=-params.learning_rate / first_correction)


def _metrics(adapter: Adapter, params: AdamParams, norm: float, clipped: bool) -> dict[str, float]:
    return adapter.window.losses | {
        "grad_norm": norm,
        "clipped": float(clipped),
        "lr": params.learning_rate,
        "step": float(adapter.num_steps),
        "num_tokens": float(adapter.window.num_tokens),
    }
