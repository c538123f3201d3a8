"""Steps that are repeated from a tape compute what the layers do."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trainhouse.workers.ops.cpu.step_tape import StepTape
from trainhouse.workers.ops.fused import RmsNorm, swiglu
from trainhouse.workers.ops.kernels import load_kernels
from trainhouse.workers.protocol.calls import SamplingSlice
from trainhouse.workers.sampler import decode_steps

from ....drawn import assert_same_sample
from ....tiny import tiny_model
from ...adapted import Adapted
from ...sampler.test_sampler import finish, job, new_sampler, prompt

KINDS = ("qwen3", "qwen3_5", "qwen3_moe", "deepseek_v3", "granite4", "gemma4", "gpt_oss")
# Their experts' products read how many tokens each expert has.
READING = ("gpt_oss",)
STEPS = 40


def new_tape() -> StepTape:
    kernels = load_kernels()
    assert kernels is not None
    tape = kernels.new_tape()
    assert isinstance(tape, StepTape)
    return tape


needs_kernels = pytest.mark.skipif(load_kernels() is None, reason="needs a C compiler")


@pytest.fixture(scope="module", params=KINDS)
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    adapted = Adapted(tiny_model(request.param, tmp_path_factory.mktemp(request.param)))
    for name in ("one", "other"):
        adapted.create(name)
    return adapted


@torch.no_grad()
@needs_kernels
def test_repeats_operations_on_new_numbers() -> None:
    x, weight = torch.randn(6, 16), torch.randn(32, 16)
    norm = RmsNorm(torch.randn(16), torch.tensor(1e-6))

    def compute() -> Tensor:
        gate, up = torch.nn.functional.linear(norm(x), weight).chunk(2, dim=-1)
        total = torch.zeros(6, 16)
        total += swiglu(gate, up)
        values, places = total.topk(3, dim=-1)
        return torch.cat([values.sigmoid(), places.float(), total.exp().sum(-1, keepdim=True)], dim=-1)

    compute()  # The norm reads its epsilon once.
    tape = new_tape()
    first = tape.record(compute).clone()
    assert tape.can_repeat
    x.copy_(torch.randn(6, 16))
    wanted = compute()
    assert torch.equal(tape.repeat(), wanted)
    assert not torch.equal(first, wanted)


DEPENDING = {
    "numbers in Python": lambda x: x * x.tolist()[0][0],
    "one number in Python": lambda x: x * x[0, 0].item(),
    "numbers of numpy": lambda x: x * float(x.numpy()[0, 0]),
    "an array of numpy": lambda x: x * float(np.asarray(x)[0, 0]),
    "a mask": lambda x: x[x > 0],
    "random numbers": torch.rand_like,
}


@torch.no_grad()
@needs_kernels
@pytest.mark.parametrize("compute", DEPENDING.values(), ids=DEPENDING)
def test_what_depends_on_more_than_tensors_is_not_repeated(compute: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(4, 4)
    for function, can_repeat in ((compute, False), (torch.exp, True)):
        tape = new_tape()
        tape.record(lambda function=function: function(x))
        assert tape.can_repeat == can_repeat


@torch.no_grad()
@needs_kernels
def test_large_results_are_not_kept() -> None:
    x, tape = torch.randn(1024, 1024), new_tape()
    tape.record(lambda: sum((x.exp() for _ in range(20)), x))
    assert not tape.can_repeat


@needs_kernels
@pytest.mark.parametrize("adapters", [("one",), ("one", "other"), (None,)], ids=["one", "two", "none"])
def test_repeated_steps_sample_what_single_ones_do(
    adapters: tuple[str | None, ...], adapted: Adapted, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The same holds if each token needs a look, here for other likely tokens."""
    computed, run = [0], adapted.base.hidden_states

    def counting(*arguments: Any, **more: Any) -> Tensor:
        computed[0] += 1
        return run(*arguments, **more)

    monkeypatch.setattr(adapted.base, "hidden_states", counting)
    found = []
    for most_likely, has_tape in ((0, True), (1, True), (0, False)):
        if not has_tape:
            monkeypatch.setattr(decode_steps, "new_step_tape", lambda: None)
        sampler, computed[0] = new_sampler(adapted), 0
        asked = [
            job(str(number), prompt(5 + number), adapters[number % len(adapters)], num_samples=2, max_tokens=STEPS)
            for number in range(4)
        ]
        found.append(finish(sampler, *(replace(each, topk_sample_logprobs=most_likely) for each in asked)))
        assert (computed[0] < STEPS / 2) == (has_tape and request.node.callspec.params["adapted"] not in READING)
    *repeated, single = found
    for job_id, response in single.items():
        for one, *others in zip(response.sequences, *(each[job_id].sequences for each in repeated), strict=True):
            for other in others:
                assert_same_sample(other, one, 1e-5)


@needs_kernels
def test_new_weights_are_used_at_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices are of one step, so a tape remains from slice to slice until the adapter changes."""
    adapted = Adapted(tiny_model("qwen3_moe", tmp_path))

    def sampled(name: str, factor: float) -> list[int]:
        adapter, sampler = adapted.create(name), new_sampler(adapted)
        one = job("1", prompt(5), name, max_tokens=STEPS)
        for joining in ((one,), *[()] * 9):
            sampler.slice(SamplingSlice(joining, (), 0.0))
        for pair in adapter.pairs.values():
            pair.b.mul_(factor)
        return list(finish(sampler)["1"].sequences[0].tokens)

    changed = sampled("repeated", -3.0)
    assert changed != sampled("unaltered", 1.0)
    monkeypatch.setattr(decode_steps, "new_step_tape", lambda: None)
    assert changed == sampled("computed", -3.0)
