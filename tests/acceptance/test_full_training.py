"""Full fine-tuning compared with TRL, an independent reference: `make test-trl`.

A naive loop and our server must agree with `judged`, TRL's ten steps.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from trainhouse.client import AdamParams, ServiceClient

from ..live import live_server
from .ten_steps import TOLERANCE, Trained, assert_agree, judged_steps, random_batches, reference_steps, weights_of

pytestmark = pytest.mark.full

# At the usual eps of 1e-8, noise moves an element whose gradient is only rounding noise: the same loop with its rows
# reversed moved single elements by 2e-4 of the largest weight.
ADAM = AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-4, weight_decay=0.1)
KINDS = ("qwen3", "qwen3_tied", "qwen3_moe")


@pytest.fixture(scope="session")
def trl_python() -> str:
    python = os.environ.get("TRAINHOUSE_TRL_PYTHON")
    if not python:
        pytest.skip("TRAINHOUSE_TRL_PYTHON names no Python that has TRL: make test-trl")
    return python


@pytest.fixture(scope="session")
def judged(
    trl_python: str, tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Trained]:
    """Returns a function that trains a kind of model on `random_batches()` with ADAM by TRL."""

    @cache
    def trained(kind: str) -> Trained:
        directory = tmp_path_factory.mktemp("judged")
        return judged_steps(trl_python, tiny_models[kind], random_batches(), ADAM, directory)

    return trained


def test_assert_agree_checks_each_loss_and_weight(tiny_models: dict[str, Path]) -> None:
    trained = reference_steps(tiny_models["qwen3"], random_batches()[:2], ADAM)
    for factor, agrees in ((1 + TOLERANCE / 2, True), (1 + 2 * TOLERANCE, False)):
        loss = replace(trained, losses=[trained.losses[0], trained.losses[1] * factor])
        norm = {"model.norm.weight": trained.weights["model.norm.weight"] * factor}
        for other in (loss, replace(trained, weights=trained.weights | norm)):
            with nullcontext() if agrees else pytest.raises(AssertionError):
                assert_agree(other, trained)
    with pytest.raises(AssertionError):
        assert_agree(replace(trained, weights=weights_of(tiny_models["qwen3"])), trained)


@pytest.mark.parametrize("kind", KINDS)
def test_a_naive_loop_agrees_with_trl(
    kind: str, judged: Callable[[str], Trained], tiny_models: dict[str, Path]
) -> None:
    """The controls change one hyperparameter or one target."""
    batches, ours = random_batches(), tiny_models[kind]
    assert_agree(reference_steps(ours, batches, ADAM), judged(kind))
    others = {"learning_rate": 1.001e-3, "beta1": 0.901, "beta2": 0.951, "eps": 1.01e-4, "weight_decay": 0.0}
    for field, value in others.items():
        with pytest.raises(AssertionError):
            assert_agree(reference_steps(ours, batches, ADAM.model_copy(update={field: value})), judged(kind))
    batches[-1][-1].loss_fn_inputs["weights"][-1] = 0
    with pytest.raises(AssertionError):
        assert_agree(reference_steps(ours, batches, ADAM), judged(kind))


@pytest.mark.parametrize(
    ("kind", "parallel"),
    [
        *(("qwen3", spec) for spec in ("single", "fsdp=2")),
        ("qwen3_tied", "single"),
        *(("qwen3_moe", spec) for spec in ("single", "fsdp=2", "fsdp=2,ep=2")),
    ],
)
def test_our_server_agrees_with_trl(
    kind: str, parallel: str, judged: Callable[[str], Trained], tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    with live_server({"tiny": tiny_models[kind]}, tmp_path / "state", parallel=parallel) as server:
        service = ServiceClient(base_url=server.url, api_key="tml-judged")
        client = service.create_full_training_client("tiny")
        losses = []
        for batch in random_batches():
            output = client.forward_backward(batch, "cross_entropy").result(60)
            client.optim_step(ADAM, gradient_scale="mean").result(60)
            losses.append(
                output.metrics["loss:sum"] / float(sum(datum.loss_fn_inputs["weights"].sum() for datum in batch))
            )
        path = client.save_state("ten-steps").result(60).path
        service.create_rest_client().download_checkpoint(path, tmp_path / "saved").result(60)
    assert_agree(Trained(losses, weights_of(tmp_path / "saved")), judged(kind))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3_moe", {"router_aux_loss_coef": None}),  # then the model's own, 0.001
        ("qwen3", {"max_grad_norm": 1.0}),
        ("qwen3", {"train_sampling_strategy": "random"}),
        ("qwen3", {"lr_scheduler_type": "linear"}),
        ("qwen3", {"bf16": True}),
    ],
)
def test_trl_with_its_defaults_disagrees(
    kind: str,
    changes: dict[str, Any],
    trl_python: str,
    judged: Callable[[str], Trained],
    tiny_models: dict[str, Path],
    tmp_path: Path,
) -> None:
    """Each default that the reference turns off would show."""
    otherwise = judged_steps(trl_python, tiny_models[kind], random_batches(), ADAM, tmp_path, **changes)
    with pytest.raises(AssertionError):
        assert_agree(otherwise, judged(kind))
