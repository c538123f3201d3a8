"""vLLM loads saved drafts unchanged, and accepts as many draft tokens as the training metrics say."""

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainhouse.schemas.models import DraftConfig
from trainhouse.schemas.training import AdamParams, Datum, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.protocol.calls import OperationPart, OptimizerStep, RunSpec
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.worker.worker import Worker

from ...tiny import tiny_model
from ..jobs import answers, job

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

NUM_TOKENS, NUM_DRAFT_TOKENS = 40, 3
ADAM = AdamParams(learning_rate=1e-2, grad_clip_norm=0.5)
LOSSES: dict[str, dict[str, float]] = {"eagle3": {"ttt_length": 4}, "dflash": {"num_anchors": 40}}
SHAPES: dict[str, dict[str, Any]] = {"eagle3": {}, "dflash": {"num_layers": 2, "block_size": 4, "mask_token_id": 0}}


@dataclass(frozen=True)
class Target:
    """rollouts: int [n, tokens], the model's likeliest tokens after prompts of four tokens."""

    worker: Worker
    directory: Path
    rollouts: np.ndarray


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Uses head_dim 32, because vLLM's CPU attention does not support 16."""
    directory = tmp_path_factory.mktemp("target")
    tiny_model("llama", directory, num_hidden_layers=4, initializer_range=0.2, head_dim=32)
    worker = Worker(WorkerConfig(ServedModel("tiny", str(directory)), threads=1))
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 512, 4) for _ in range(12)]
    jobs = [job(str(i), prompt, temperature=0.0, max_tokens=NUM_TOKENS) for i, prompt in enumerate(prompts)]
    found: Mapping[str, Any] = answers(worker.sample_slice, *jobs)
    rows = [np.concatenate([prompt, found[str(i)].sequences[0].tokens]) for i, prompt in enumerate(prompts)]
    return Target(worker, directory, np.stack(rows))


@dataclass(frozen=True)
class Draft:
    """greedy: for each draft token, the share of anchors from which it and all before it are right."""

    directory: Path
    greedy: list[float]


def trained(target: Target, directory: Path, algorithm: Any, num_steps: int, **fields: Any) -> Draft:
    worker = target.worker
    worker.create_run(
        RunSpec("draft", DraftConfig(algorithm=algorithm, seed=3, **SHAPES[algorithm], **fields), "draft")
    )
    if "draft_vocab_size" in fields:
        worker.set_vocabulary("draft", np.arange(1, 1 + fields["draft_vocab_size"], dtype=np.int64))
    for number in range(num_steps):
        passed(target, algorithm, number)
        worker.apply_steps((OptimizerStep("draft", ADAM, "mean"),))
    metrics = passed(target, algorithm, 500, forward_only=True).metrics
    worker.save_run("draft", str(directory), optimizer=False)
    worker.drop_run("draft")
    return Draft(directory, [metrics[f"greedy/{i}:mean"] for i in range(1, 1 + NUM_DRAFT_TOKENS)])


def passed(target: Target, algorithm: str, number: int, forward_only: bool = False) -> ForwardBackwardOutput:
    data = tuple(Datum(row.astype(np.int32), {}) for row in target.rollouts)
    config = LOSSES[algorithm] | ({"seed": number} if algorithm == "dflash" else {})
    request = ForwardBackwardRequest("draft", 1, data, algorithm, config, forward_only=forward_only)
    (answer,) = target.worker.run_pass((OperationPart(number, request),))
    assert isinstance(answer, ForwardBackwardOutput), answer
    return answer


def in_vllm(python: str, target: Target, method: str, draft: Path, answer: Path) -> dict[str, Any]:
    arguments = {
        "model": str(target.directory),
        "draft": str(draft),
        "method": method,
        "num_tokens": NUM_DRAFT_TOKENS,
        "prompts": target.rollouts[:, :4].tolist(),
        "max_tokens": NUM_TOKENS,
        "answer": str(answer),
    }
    script = Path(__file__).with_name("vllm_drafting.py")
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PATH": "/usr/bin:/bin",
    }
    done = subprocess.run(
        [python, str(script)], input=json.dumps(arguments).encode(), capture_output=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    return json.loads(answer.read_text())


def acceptance_rates(answer: Mapping[str, Any]) -> np.ndarray:
    """Returns, by position, the share of passes whose draft tokens up to there were accepted."""
    return np.array(answer["accepted"]) / answer["passes"]


@pytest.mark.parametrize(
    ("algorithm", "num_steps", "fields"),
    [("eagle3", 60, {}), ("eagle3", 60, {"draft_vocab_size": 300}), ("dflash", 120, {})],
    ids=["EAGLE-3", "EAGLE-3 of few tokens", "DFlash"],
)
def test_vllm_accepts_a_saved_draft_as_often_as_training_predicts(
    vllm_python: str, target: Target, tmp_path: Path, algorithm: str, num_steps: int, fields: dict[str, Any]
) -> None:
    (tmp_path / "draft").mkdir()
    draft = trained(target, tmp_path / "draft", algorithm, num_steps, **fields)
    answer = in_vllm(vllm_python, target, algorithm, draft.directory, tmp_path / "answer.json")
    np.testing.assert_array_equal(answer["tokens"], target.rollouts[:, 4:])
    expected = np.array(draft.greedy)
    assert expected[0] > 0.5, "the draft has not learned enough for a difference to show"
    # Training scores all anchors; sampling visits only those after accepted draft tokens.
    assert abs(acceptance_rates(answer) - expected).max() < 0.1, (acceptance_rates(answer), expected)
    if algorithm == "eagle3":
        config = json.loads((draft.directory / "config.json").read_text())
        config["eagle_aux_hidden_state_layer_ids"] = [one + 1 for one in config["eagle_aux_hidden_state_layer_ids"]]
        (draft.directory / "config.json").write_text(json.dumps(config))
        other = in_vllm(vllm_python, target, algorithm, draft.directory, tmp_path / "other.json")
        assert abs(acceptance_rates(other) - expected).max() > 0.2, "features of other layers are not noticed"
