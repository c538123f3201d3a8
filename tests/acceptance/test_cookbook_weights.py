"""tinker-cookbook downloads checkpoints from a live server, and merges and converts them: its functions, unchanged."""

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from ..live import LiveServer, live_server
from ..official import official_service
from ..workers.adapted import quieten_peft
from .test_official_sdk import batch, datum, logprobs_of, token_logprobs, train

weights: Any = pytest.importorskip("tinker_cookbook.weights", reason="make setup installs tinker-cookbook")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

KEY = "tml-cookbook"
KINDS = ("qwen3", "qwen3_moe")
TOKENS = [5, 6, 7, 8, 9, 10]


@pytest.fixture(scope="module")
def server(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(
        {f"tiny/{kind}": tiny_models[kind] for kind in KINDS}, tmp_path_factory.mktemp("state")
    ) as running:
        yield running


@pytest.fixture
def trained(
    request: pytest.FixtureRequest, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tinker.TrainingClient]:
    """Yields a model of the kind `request.param` after three steps."""
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    logging.disable(logging.WARNING)
    with official_service(server.url, KEY) as service:
        client = service.create_lora_training_client(f"tiny/{request.param}", rank=4, seed=1).result(60)
        train(client, batch(), 3)
        yield client
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(("trained", "kind"), [(kind, kind) for kind in KINDS], indirect=["trained"])
@pytest.mark.parametrize("saved", ["external", "state"])
def test_downloaded_checkpoints_are_merged(
    trained: tinker.TrainingClient,
    kind: str,
    saved: str,
    server: LiveServer,
    tiny_models: dict[str, Path],
    tmp_path: Path,
) -> None:
    """The cookbook exports a state encrypted to a key of its own."""
    saving = trained.save_weights_external("export") if saved == "external" else trained.save_state("state")
    given = {"base_model": str(tiny_models[kind]), "adapter_path": str(tmp_path / "adapter")}
    weights.download(tinker_path=saving.result(60).path, output_dir=given["adapter_path"], base_url=server.url)
    weights.build_hf_model(**given, output_path=str(tmp_path / "merged"))
    weights.build_lora_adapter(**given, output_path=str(tmp_path / "peft"))
    bare = AutoModelForCausalLM.from_pretrained(tiny_models[kind], dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    ours = logprobs_of(trained.forward([datum(TOKENS)], "cross_entropy").result(60))
    before = token_logprobs(bare, torch.tensor(TOKENS))
    assert np.abs(before - ours).max() > 1e-2
    with warnings.catch_warnings():
        quieten_peft()
        adapted = PeftModel.from_pretrained(bare, tmp_path / "peft")
    for tuned in (merged, adapted):
        np.testing.assert_allclose(token_logprobs(tuned, torch.tensor(TOKENS)), ours, atol=1e-5)
