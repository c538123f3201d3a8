"""tinker-cookbook's evaluations and loggers, without a network."""

import json
import re

import pytest

from ...client.test_trackers import wandb_rows
from .data_sets import CHATS_FILE
from .releases import BASE
from .user import Cookbook, Run

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


def test_benchmark_and_likelihood_tell_a_taught_model_from_its_base(cookbook: Cookbook, taught: Run) -> None:
    base = json.loads(cookbook.program("evaluate", BASE, CHATS_FILE))
    better = json.loads(cookbook.program("evaluate", BASE, CHATS_FILE, taught.checkpoints[-1]["sampler_path"]))
    assert base["num_errors"] == better["num_errors"] == 0
    assert base["score"] == 0 and 0 < better["score"] <= 1
    assert better["test/nll"] < base["test/nll"] / 20 and better["test/bpb"] < base["test/bpb"] / 20
    # As the recipe logged it, on the same conversations.
    assert better["test/nll"] == pytest.approx(taught.finite("train_mean_nll")[-1], abs=0.05)


def test_inspect_finds_model_and_renderer_of_a_checkpoint(cookbook: Cookbook, taught: Run) -> None:
    checkpoint = f"model_path={taught.checkpoints[-1]['sampler_path']}"
    assert inspected(cookbook, checkpoint) == 1
    assert inspected(cookbook, f"model_name={BASE}") == 0


def inspected(cookbook: Cookbook, model: str) -> float:
    """Returns the accuracy in programs/sums.py."""
    module = "tinker_cookbook.eval.run_inspect_evals"
    printed = cookbook.run("-m", module, model, "tasks=sums:sums", "max_tokens=24")
    found = re.search(r"accuracy +([\d.]+)", printed)
    assert found, printed
    return float(found[1])


def test_weights_and_biases_gets_what_is_in_metrics_jsonl(cookbook: Cookbook) -> None:
    options = {"batch_size": 16, "max_steps": 3, "wandb_project": "cookbook", "wandb_name": "mine"}
    run = cookbook.recipe("preference.dpo.train", "logged", **options)
    [path] = (cookbook.folder / "logged").glob("wandb/offline-run-*/*.wandb")
    rows = [row for row in wandb_rows(path) if "dpo_loss" in row]
    assert [row["dpo_loss"] for row in rows] == run.finite("dpo_loss")
    assert [row["_step"] for row in rows] == [0, 1, 2]
