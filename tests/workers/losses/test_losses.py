"""Each loss against its formula (docs/losses.md), written out in a few lines."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor
from trainhouse.workers.batch.validated import denominator_of
from trainhouse.workers.losses import LOSSES, VALUE_LOSSES, Loss

EVERY = LOSSES | VALUE_LOSSES

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]


def cross_entropy(ell: Tensor, i: Inputs, c: Config) -> Tensor:
    return -(i["weights"] * ell).sum()


def importance_sampling(ell: Tensor, i: Inputs, c: Config) -> Tensor:
    return -((ell - i["logprobs"]).exp() * i["advantages"]).sum()


def ppo(ell: Tensor, i: Inputs, c: Config) -> Tensor:
    r, a = (ell - i["logprobs"]).exp(), i["advantages"]
    clipped = torch.maximum(torch.minimum(r, i["clip_high_threshold"]), i["clip_low_threshold"])
    return -torch.where(r * a < clipped * a, r * a, clipped * a).sum()


def cispo(ell: Tensor, i: Inputs, c: Config) -> Tensor:
    with torch.no_grad():
        r = (ell - i["logprobs"]).exp()
        r = torch.maximum(torch.minimum(r, i["clip_high_threshold"]), i["clip_low_threshold"])
    return -(r * ell * i["advantages"]).sum()


def dro(ell: Tensor, i: Inputs, c: Config) -> Tensor:
    has_advantage = i["advantages"] != 0
    ell, q, a = ell[has_advantage], i["logprobs"][has_advantage], i["advantages"][has_advantage]
    return -(ell * a - 0.5 * c["beta"] * (ell - q) ** 2).sum()


def gspo(ell: Tensor, i: Inputs, c: Config) -> Tensor:
    a, mask = i["advantages"], i["sequence_ratio_mask"] != 0
    s = (ell - i["logprobs"])[mask].mean().exp().detach() * (ell - ell.detach()).exp()
    clipped = torch.maximum(torch.minimum(s, i["clip_high_threshold"]), i["clip_low_threshold"])
    return -torch.where(s * a < clipped * a, s * a, clipped * a).sum()


def stable_reinforce(ell: Tensor, i: Inputs, c: Config) -> Tensor:
    a, is_sampled = i["advantages"], (i["sampled_mask"] * i["advantages"]) != 0
    r = torch.where(is_sampled, (ell - i["logprobs"]).exp(), 1.0).detach()
    drift = (ell - i["logprobs"])[is_sampled]
    return -(torch.minimum(r, torch.tensor(2.0)) * ell * a).sum() + c["kl_coeff"] * 0.5 * (drift**2).sum()


def value_mse(v: Tensor, i: Inputs, c: Config) -> Tensor:
    near = i["old_values"] + (v - i["old_values"]).clamp(-c["clip"], c["clip"])
    worse = torch.stack([(v - i["returns"]) ** 2, (near - i["returns"]) ** 2]).amax(0)
    return (i["weights"] * worse / 2).sum()


FORMULAS: dict[str, Callable[[Tensor, Inputs, Config], Tensor]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
    "stable_reinforce": stable_reinforce,
    "value_mse": value_mse,
}
LENGTH = 24
every_loss = pytest.mark.parametrize("name", EVERY)


def some_inputs(loss: Loss) -> dict[str, Tensor]:
    """Returns all inputs that the loss reads; the first quarter is a prompt, with no weight, advantage or sampler."""
    generator = torch.Generator().manual_seed(3)
    is_response = torch.arange(LENGTH) >= LENGTH // 4
    inputs = {
        "weights": torch.randn(LENGTH, generator=generator) * is_response,
        "logprobs": (some_logprobs() + 0.6 * torch.randn(LENGTH, generator=generator)) * is_response,
        "advantages": torch.randn(LENGTH, generator=generator) * is_response,
        "clip_low_threshold": torch.full((LENGTH,), loss.config.get("clip_low_threshold", 0.5)),
        "clip_high_threshold": torch.full((LENGTH,), loss.config.get("clip_high_threshold", 1.5)),
        "sequence_ratio_mask": (torch.arange(LENGTH) % 5 != 0) * is_response.float(),
        "returns": some_logprobs() + torch.randn(LENGTH, generator=generator),
        "old_values": some_logprobs() + 0.4 * torch.randn(LENGTH, generator=generator),
        "sampled_mask": (torch.arange(LENGTH) >= LENGTH // 3).float(),
    }
    return {name: inputs[name] for name in (*loss.required, *loss.optional)}


def some_logprobs() -> Tensor:
    return -3 + torch.randn(LENGTH, generator=torch.Generator().manual_seed(4))


def value_and_gradient(function: Callable[[Tensor], Tensor], logprobs: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logprobs.clone().requires_grad_()
    value = function(leaf)
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient


def ours(loss: Loss, inputs: Inputs, config: Config, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    return value_and_gradient(lambda ell: loss.function(ell, inputs, config).losses.sum(), logprobs)


def test_every_loss_has_a_formula_here() -> None:
    assert FORMULAS.keys() == EVERY.keys()


@every_loss
def test_value_and_gradient_are_those_of_the_formula(name: str) -> None:
    loss, logprobs = EVERY[name], some_logprobs()
    inputs = some_inputs(loss)
    value, gradient = ours(loss, inputs, loss.config, logprobs)
    expected_value, expected = value_and_gradient(lambda ell: FORMULAS[name](ell, inputs, loss.config), logprobs)
    torch.testing.assert_close(value, expected_value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)
    assert gradient.any()
    with pytest.raises(AssertionError):  # the tolerance distinguishes a mean from a sum
        torch.testing.assert_close(value / LENGTH, expected_value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name, loss in EVERY.items() if loss.config])
def test_config_changes_the_loss_as_the_formula_says(name: str) -> None:
    loss, logprobs = EVERY[name], some_logprobs()
    changed = {"clip_low_threshold": 0.3, "clip_high_threshold": 3.0, "beta": 0.7, "kl_coeff": 0.5, "clip": 0.05}
    config = {key: changed[key] for key in loss.config}
    inputs = some_inputs(loss) | {
        key: torch.full((LENGTH,), value) for key, value in config.items() if key in loss.optional
    }
    value, gradient = ours(loss, inputs, config, logprobs)
    expected_value, expected = value_and_gradient(lambda ell: FORMULAS[name](ell, inputs, config), logprobs)
    torch.testing.assert_close(value, expected_value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(AssertionError):
        default = ours(loss, some_inputs(loss), loss.config, logprobs)
        torch.testing.assert_close(gradient, default[1], rtol=1e-5, atol=1e-6)


@every_loss
def test_ratios_are_left_to_losses_of_drafts(name: str) -> None:
    """Other heads drop them: see LossOutput."""
    loss = EVERY[name]
    output = loss.function(some_logprobs(), some_inputs(loss), loss.config)
    assert not output.ratios and output.denominator is None


@every_loss
@pytest.mark.parametrize("garbage", [float("-inf"), float("inf"), float("nan"), -1e30])
def test_uncounted_positions_contribute_exactly_nothing(name: str, garbage: float) -> None:
    loss, logprobs = EVERY[name], some_logprobs()
    inputs = some_inputs(loss)
    uncounted = inputs[loss.counted_by] == 0
    broken = torch.where(uncounted, garbage, logprobs)
    if "logprobs" in inputs:
        inputs = inputs | {"logprobs": torch.where(uncounted, garbage, inputs["logprobs"])}
    value, gradient = ours(loss, inputs, loss.config, broken)
    clean_value, clean = ours(loss, some_inputs(loss), loss.config, logprobs)
    assert torch.equal(value, clean_value)
    assert torch.equal(gradient, clean)
    assert not gradient[uncounted].any()
    per_position = loss.function(broken, inputs, loss.config)
    assert not per_position.losses[uncounted].any()
    assert not any(bool(values[uncounted].any()) for values in per_position.metrics.values())


def test_kl_and_clip_fraction_are_zero_at_uncounted_positions() -> None:
    loss = LOSSES["ppo"]
    inputs = {
        "logprobs": torch.tensor([0.0, -1.0, -1.0, -1.0]),
        "advantages": torch.tensor([0.0, 1.0, -1.0, 1.0]),
        "clip_low_threshold": torch.full((4,), 0.8),
        "clip_high_threshold": torch.full((4,), 1.2),
    }
    metrics = loss.function(torch.tensor([-9.0, -1.5, -0.5, -1.1]), inputs, loss.config).metrics
    assert metrics["kl"].tolist() == pytest.approx([0, 0.5, -0.5, 0.1])
    assert metrics["clip_fraction"].tolist() == [False, True, True, False]


def test_the_mean_divides_by_summed_weights_or_by_positions_with_an_advantage() -> None:
    counts = np.array([0.0, 0.5, -0.25, 2.0], np.float32)
    assert denominator_of(LOSSES["cross_entropy"], counts) == 2.25
    assert denominator_of(LOSSES["ppo"], counts) == 3.0
