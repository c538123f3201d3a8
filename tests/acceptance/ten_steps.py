"""Ten steps of full fine-tuning that all sides make alike; a naive loop and TRL are independent references."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from trainhouse.client import AdamParams, Datum
from transformers import AutoModelForCausalLM, PreTrainedModel

JUDGE = Path(__file__).with_name("trl_judge.py")
TOLERANCE = 1e-5
"""Relative; for a matrix, to its largest weight."""
NUM_STEPS = 10
ROWS = 4
"""Rows of a step."""

Batches = list[list[Datum]]


@dataclass(frozen=True)
class Trained:
    """losses: mean over the targets of each step, before the step. weights: by their names in transformers' model."""

    losses: list[float]
    weights: dict[str, Tensor]


def random_batches(seed: int = 0) -> Batches:
    """Rows of 5 to 40 tokens; about a third are not targets, so that steps differ in their number of targets.

    No token is the tiny models' padding, 0: transformers never trains its embedding row.
    """
    random = np.random.default_rng(seed)
    return [[_random_row(random) for _ in range(ROWS)] for _ in range(NUM_STEPS)]


def _random_row(random: np.random.Generator) -> Datum:
    tokens = random.integers(3, 512, random.integers(6, 42))
    weights = random.random(len(tokens) - 1) < 0.7
    weights[-1] = True  # TRL drops rows without any target
    return Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": weights})


def reference_steps(model_directory: Path, batches: Batches, adam: AdamParams) -> Trained:
    """Trains with a naive loop: one row at a time, never padded."""
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    betas = (adam.beta1, adam.beta2)
    optimizer = torch.optim.AdamW(
        model.parameters(), adam.learning_rate, betas, eps=adam.eps, weight_decay=adam.weight_decay
    )
    losses = [_reference_step(model, optimizer, batch) for batch in batches]
    return Trained(losses, model.state_dict())


def _reference_step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: list[Datum]) -> float:
    num_targets = float(sum(datum.loss_fn_inputs["weights"].sum() for datum in batch))
    losses = [_summed_loss(model, datum) / num_targets for datum in batch]
    for loss in losses:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return sum(loss.item() for loss in losses)


def _summed_loss(model: PreTrainedModel, datum: Datum) -> Tensor:
    targets, weights = (torch.from_numpy(datum.loss_fn_inputs[name]) for name in ("target_tokens", "weights"))
    logits = model(torch.from_numpy(datum.tokens).long()[None]).logits[0]
    return (nn.functional.cross_entropy(logits, targets, reduction="none") * weights).sum()


def judged_steps(
    python: str, model_directory: Path, batches: Batches, adam: AdamParams, directory: Path, **changes: Any
) -> Trained:
    """Trains with TRL in another Python. changes: of its SFTConfig, to provoke differences."""
    exercise = {
        "batches": [[_whole_row(datum) for datum in batch] for batch in batches],
        "adam": adam.model_dump(),
        "changes": changes,
    }
    (directory / "exercise.json").write_text(json.dumps(exercise))
    # -I isolates it from this process's environment.
    command = [python, "-I", JUDGE, model_directory, directory / "exercise.json", directory]
    with (directory / "judge.log").open("wb") as log:
        status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=200, check=False).returncode
    assert status == 0, (directory / "judge.log").read_text(errors="replace")[-8000:]
    return Trained(json.loads((directory / "losses.json").read_text()), weights_of(directory / "model"))


def _whole_row(datum: Datum) -> dict[str, list[int]]:
    targets, weights = datum.loss_fn_inputs["target_tokens"], datum.loss_fn_inputs["weights"]
    assert set(weights.tolist()) <= {0.0, 1.0}, f"weights {weights}: TRL supports only the weights 0 and 1"
    return {"tokens": [*datum.tokens.tolist(), int(targets[-1])], "weights": weights.astype(int).tolist()}


def weights_of(model_directory: Path) -> dict[str, Tensor]:
    """Reads all weight files with transformers, and asserts that no weight is missing or unexpected."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32, output_loading_info=True)
    model, problems = loaded
    assert not any(problems.values()), problems
    return model.state_dict()


def assert_agree(one: Trained, other: Trained) -> None:
    np.testing.assert_allclose(one.losses, other.losses, rtol=TOLERANCE)
    assert one.weights.keys() == other.weights.keys()
    for name, weight in one.weights.items():
        apart = (weight - other.weights[name]).abs().max() / other.weights[name].abs().max()
        assert apart <= TOLERANCE, f"{name} is {apart:.1e} apart"
