"""Sampler groups of several ranks draft tokens with drafts that the training workers have trained."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainhouse.schemas.models import DraftConfig
from trainhouse.schemas.sampling import SamplingParams
from trainhouse.schemas.training import AdamParams, Datum, ForwardBackwardRequest
from trainhouse.workers.dispatch import DispatchConfig, WorkerDispatch
from trainhouse.workers.protocol.calls import OptimizerStep, RunSpec
from trainhouse.workers.protocol.parallel_spec import ParallelSpec
from trainhouse.workers.protocol.worker_config import SamplingConfig

from ...drawn import as_drawn
from ...tiny import tiny_model
from .test_sampler_groups import TOKENS, job, running, tiny

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

LOSSES: dict[Any, dict[str, float]] = {"eagle3": {"ttt_length": 4}, "dflash": {"seed": 0}}
SHAPES: dict[Any, dict[str, Any]] = {"eagle3": {}, "dflash": {"num_layers": 2, "block_size": 4}}


async def saved_draft(dispatch: WorkerDispatch, algorithm: Any, tokens: np.ndarray, directory: Path) -> None:
    """Saves a draft that was trained on the tokens."""
    config = DraftConfig(algorithm=algorithm, seed=3, **SHAPES[algorithm])
    await dispatch.create_run("tiny", RunSpec("draft", config, "draft"), "tenant")
    for _ in range(40):
        data = (Datum(tokens, {}),)
        await dispatch.forward_backward(ForwardBackwardRequest("draft", 0, data, algorithm, LOSSES[algorithm]))
        await dispatch.optim_step(OptimizerStep("draft", AdamParams(learning_rate=1e-2, grad_clip_norm=0.5)))
    await dispatch.save_run("draft", directory, optimizer=False)
    await dispatch.drop_run("draft")


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
async def test_a_sampler_along_tp_uses_a_trained_draft(algorithm: str, tmp_path: Path) -> None:
    """The tokens are the same as without it. Control: a draft of other tokens has fewer tokens accepted."""
    model = tiny(tiny_model("qwen3", tmp_path / "model", num_hidden_layers=4, initializer_range=0.2))
    greedy = replace(job("greedy", max_tokens=40), params=SamplingParams(max_tokens=40, temperature=0.0, seed=7))
    samplers = SamplingConfig(1, ParallelSpec.parse("tp=2"), directory=str(tmp_path / "copies"))
    async with running(DispatchConfig((model,), sampling=samplers)) as dispatch:
        [plain] = (await dispatch.sample("tiny", greedy)).sequences
        rollout = np.concatenate([TOKENS[:3], plain.tokens]).astype(np.int32)
        accepted = {}
        for name, tokens in (("trained", rollout), ("of others", rollout[::-1].copy())):
            (tmp_path / name).mkdir()
            await saved_draft(dispatch, algorithm, tokens, tmp_path / name)
            await dispatch.load_draft("tiny", name, tmp_path / name)
            drafted = await dispatch.sample("tiny", replace(greedy, job_id=name, draft_id=name))
            assert as_drawn(drafted.sequences[0]) == as_drawn(plain)
            assert drafted.guesses is not None
            accepted[name] = drafted.guesses.acceptance_length
    assert accepted["trained"] > accepted["of others"] and accepted["trained"] > 1.5, accepted
