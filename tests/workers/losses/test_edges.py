"""Losses at the edges of their inputs, against the formula and its derivative in float64, written out for one token."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import pytest
import torch
from trainhouse.workers.losses import LOSSES, VALUE_LOSSES

EVERY = LOSSES | VALUE_LOSSES
MOST = torch.finfo(torch.float32).max
HUGE = 1e30

Token = Mapping[str, float]
"""The score `l` and the inputs of a token, and the options of its loss."""


@dataclass(frozen=True)
class Expected:
    """The loss of a token and its derivative by the score."""

    value: float
    slope: float


def exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def clipped(ratio: float, t: Token) -> Expected:
    a, low, high = t["advantages"], t["clip_low_threshold"], t["clip_high_threshold"]
    if a > 0 and ratio > high:
        return Expected(-high * a, 0.0)
    if a < 0 and ratio < low:
        return Expected(-low * a, 0.0)
    return Expected(-ratio * a, -ratio * a)


def cross_entropy(t: Token) -> Expected:
    return Expected(-t["weights"] * t["l"], -t["weights"])


def importance_sampling(t: Token) -> Expected:
    value = -exp(t["l"] - t["logprobs"]) * t["advantages"]
    return Expected(value, value)


def ppo(t: Token) -> Expected:
    return clipped(exp(t["l"] - t["logprobs"]), t)


def cispo(t: Token) -> Expected:
    bounded = min(max(exp(t["l"] - t["logprobs"]), t["clip_low_threshold"]), t["clip_high_threshold"])
    return Expected(-bounded * t["l"] * t["advantages"], -bounded * t["advantages"])


def gspo(t: Token) -> Expected:
    return clipped(exp(t["l"] - t["logprobs"]) if t["sequence_ratio_mask"] else 1.0, t)


def dro(t: Token) -> Expected:
    drift = t["l"] - t["logprobs"]
    return Expected(0.5 * t["beta"] * drift**2 - t["l"] * t["advantages"], t["beta"] * drift - t["advantages"])


def stable_reinforce(t: Token) -> Expected:
    drift = t["l"] - t["logprobs"] if t["sampled_mask"] else 0.0
    ratio = min(exp(drift), 2.0)
    value = -ratio * t["l"] * t["advantages"] + 0.5 * t["kl_coeff"] * drift**2
    return Expected(value, -ratio * t["advantages"] + t["kl_coeff"] * drift)


def value_mse(t: Token) -> Expected:
    v, returns, old, clip = t["l"], t["returns"], t["old_values"], t["clip"]
    plain = Expected(0.5 * t["weights"] * (v - returns) ** 2, t["weights"] * (v - returns))
    if math.isnan(old) or abs(v - old) <= clip:
        return plain
    near = old + math.copysign(clip, v - old)
    if (near - returns) ** 2 > (v - returns) ** 2:
        return Expected(0.5 * t["weights"] * (near - returns) ** 2, 0.0)
    return plain


FORMULAS: dict[str, Callable[[Token], Expected]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
    "stable_reinforce": stable_reinforce,
    "value_mse": value_mse,
}

# Of every input and option some values at its edges; all combinations are tried.
EDGES: dict[str, tuple[float, ...]] = {
    "logprobs": (0.0, -1.0, -700.0, -1e4, 700.0, -MOST),
    "advantages": (0.0, 1.0, -1.0, 1e-30, -1e30),
    "weights": (0.0, 1.0, -2.0, 1e-38),
    "clip_low_threshold": (0.0, 0.75, 1.0),
    "clip_high_threshold": (1.0, 1.25, 4.0, MOST),
    "sequence_ratio_mask": (0.0, 1.0),
    "sampled_mask": (0.0, 1.0),
    "returns": (0.0, -1.0, HUGE),
    "old_values": (math.nan, -1.0, 0.5, HUGE),
    "beta": (0.0, 0.05),
    "kl_coeff": (0.0, 0.01),
    "clip": (0.0, 0.25),
}
SCORES = (0.0, -1.0, -700.0, -1.25)


def tokens_of(name: str) -> Iterator[Token]:
    loss = EVERY[name]
    names = dict.fromkeys((*loss.required, *loss.optional, *loss.config))
    for values in itertools.product(SCORES, *(EDGES[each] for each in names)):
        yield dict(zip(("l", *names), values, strict=True))


def computed(name: str, token: Token) -> Expected:
    loss = EVERY[name]
    score = torch.tensor([token["l"]], requires_grad=True)
    inputs = {each: torch.tensor([token[each]]) for each in (*loss.required, *loss.optional)}
    output = loss.function(score, inputs, {each: token[each] for each in loss.config})
    (gradient,) = torch.autograd.grad(output.losses.sum(), score)
    assert output.losses.dtype == torch.float32
    if token[loss.counted_by] == 0:
        assert not any(bool(metric.any()) for metric in output.metrics.values()), token
    return Expected(output.losses.item(), gradient.item())


def as_float32(wanted: Expected, name: str, token: Token) -> Expected | None:
    """Returns what is wanted of arithmetic in float32; None if numbers on the way are too large for it."""
    if token[EVERY[name].counted_by] == 0:
        return Expected(0.0, 0.0)
    on_the_way = [wanted.value, wanted.slope]
    if "logprobs" in token:
        ratio, drift = exp(token["l"] - token["logprobs"]), token["l"] - token["logprobs"]
        is_read = name == "importance_sampling" or (name in ("ppo", "gspo") and wanted.slope != 0)
        on_the_way += [ratio] if is_read and token.get("sequence_ratio_mask", 1.0) else []
        factor = token.get("beta", 0.0) or token.get("kl_coeff", 0.0) * token.get("sampled_mask", 1.0)
        on_the_way += [factor * drift * drift] if factor else []
    if "returns" in token:
        on_the_way += [(token["l"] - token["returns"]) ** 2]
        on_the_way += [] if math.isnan(token["old_values"]) else [(token["old_values"] - token["returns"]) ** 2]
    return wanted if all(abs(each) <= MOST for each in on_the_way) else None


def is_close(found: float, wanted: float) -> bool:
    # 1e-37: below, float32 loses digits.
    return math.isclose(found, wanted, rel_tol=2e-4, abs_tol=1e-37)


@pytest.mark.parametrize("name", EVERY)
def test_values_and_gradients_at_the_edges_are_those_of_the_formula(name: str) -> None:
    num_tried = num_unlike = 0
    for token in tokens_of(name):
        wanted = as_float32(FORMULAS[name](token), name, token)
        found = computed(name, token)
        if wanted is None:
            # Then the operation fails: it must not train on a number that is not the formula's.
            assert not (math.isfinite(found.value) and math.isfinite(found.slope)), (token, found)
            continue
        assert is_close(found.value, wanted.value) and is_close(found.slope, wanted.slope), (token, found, wanted)
        num_tried += 1
        other = FORMULAS[name](dict(token) | {EVERY[name].counted_by: token[EVERY[name].counted_by] * 1.01})
        num_unlike += not (is_close(found.value, other.value) and is_close(found.slope, other.slope))
    assert num_tried > 10 and num_unlike > num_tried / 4, "the tolerance detects a hundredth"


def test_every_loss_has_a_formula_for_one_token() -> None:
    assert FORMULAS.keys() == EVERY.keys()


@pytest.mark.parametrize("name", EVERY)
def test_an_edge_leaves_other_tokens_as_they_are(name: str) -> None:
    """Edges include a clipped ratio that is infinite, and an uncounted token of a sequence with others."""
    loss = EVERY[name]
    plain = {"l": -1.0, "logprobs": -1.1, "advantages": 0.5, "weights": 1.0, "sampled_mask": 1.0, "returns": 0.2}
    plain |= {"sequence_ratio_mask": 0.0, "old_values": -1.1, "clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    edge = plain | {"l": -0.5, "logprobs": -900.0 if name in ("ppo", "gspo", "cispo") else -1.0}
    edges = [edge, plain | {loss.counted_by: 0.0, "logprobs": -MOST, "returns": HUGE, "old_values": -HUGE}]
    if name == "gspo":  # the whole sequence is clipped
        edges[0] |= {"sequence_ratio_mask": 1.0}
    for other in edges:
        score = torch.tensor([plain["l"], other["l"]], requires_grad=True)
        inputs = {each: torch.tensor([plain[each], other[each]]) for each in (*loss.required, *loss.optional)}
        losses = loss.function(score, inputs, loss.config).losses
        (gradient,) = torch.autograd.grad(losses.sum(), score)
        assert losses.isfinite().all() and gradient.isfinite().all()
        if name == "gspo" and other is edges[0]:
            assert losses.tolist() == pytest.approx([-0.6, -0.6]) and not gradient.any()
        else:
            alone = computed(
                name, {**{each: plain[each] for each in ("l", *loss.required, *loss.optional)}, **loss.config}
            )
            assert (losses[0].item(), gradient[0].item()) == pytest.approx((alone.value, alone.slope), rel=1e-6)
