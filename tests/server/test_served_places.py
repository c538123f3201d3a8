"""A whole server whose checkpoints lie at a URL: saved, loaded, sampled and trained on from there."""

from pathlib import Path

import numpy as np
import pytest
from trainhouse.workers.dispatch import WorkerDispatch

from .real import MODEL, batch, running_server, sample, sample_body, server_config
from .s3 import BUCKET, S3, names_at

pytestmark = pytest.mark.anyio


async def test_runs_and_samplers_begin_from_a_checkpoint_at_a_url(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path, s3: S3
) -> None:
    place = f"s3://{BUCKET}/served"
    config = server_config(tiny_models["qwen3"], tmp_path, checkpoints=place)
    async with running_server(config, dispatch) as server:
        run = await server.create_run()
        await run.train(batch(), 3)
        path = (await run.do("save_weights", path="a"))["path"]
        assert (await run.do("save_weights_for_sampler", path="s"))["path"].endswith("sampler_weights/s")
        assert [name.rpartition("/")[2] for name in names_at(place)].count("manifest.json") == 2
        losses = await run.train(batch(), 2)
        assert (await run.do("load_weights", path=path, optimizer=True))["type"] == "load_weights"
        np.testing.assert_allclose(await run.train(batch(), 2), losses, rtol=1e-4)

        create = {"session_id": run.session_id, "sampling_session_seq_id": 0, "model_path": path, "base_model": MODEL}
        sampler_id = (await server.post("create_sampling_session", create))["sampling_session_id"]
        assert len((await sample(server, sample_body(sampler_id))).sequences[0].tokens) == 4


@pytest.mark.full
async def test_a_save_that_fails_says_so_in_its_future_and_the_run_goes_on(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path, s3: S3
) -> None:
    place = f"s3://{BUCKET}/failing"
    async with running_server(server_config(tiny_models["qwen3"], tmp_path, checkpoints=place), dispatch) as server:
        run = await server.create_run()
        s3.fails = lambda request: request.startswith("PUT")
        failed = await run.do("save_weights", path="b")
        assert place in failed["error"] and failed["category"] == "server"
        s3.fails = lambda request: False
        assert "error" not in await run.do("save_weights", path="b")
