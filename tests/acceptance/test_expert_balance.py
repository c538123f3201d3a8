"""The official SDK gets the metrics of balance between experts that it documents."""

import re
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker.types import forward_backward_output
from transformers import AutoModelForCausalLM

from ..live import live_server
from ..official import official_service
from ..workers.expert_balance import balance_metrics, balance_of, tokens_by_expert
from .test_official_sdk import batch

# The SDK leaves connections to its interpreter's end.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")

CHUNK = 3


@pytest.mark.parametrize("parallel", ["single", "ep=2"])
def test_the_official_sdk_combines_balance_over_its_chunks(
    parallel: str, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    documented = re.findall(r"``(e_\w+:\w+)``", Path(forward_backward_output.__file__).read_text())
    model, data = "tiny/experts", batch(5)
    sequences = [np.array(each.model_input.to_ints()) for each in data]
    of_chunks = [
        balance_metrics(tokens_by_expert(AutoModelForCausalLM.from_pretrained(tiny_models["qwen3_moe"]), chunk))
        for chunk in (sequences[:CHUNK], sequences[CHUNK:])
    ]
    wanted = {
        name: max(values) if name.endswith(":max") else float(np.average(values, weights=[CHUNK, 5 - CHUNK]))
        for name in of_chunks[0]
        for values in ([each[name] for each in of_chunks],)
    }
    options = {"sdk_max_chunk_datums": CHUNK, "parallel": parallel}
    with (
        live_server({model: tiny_models["qwen3_moe"]}, tmp_path / "state", **options) as server,
        official_service(server.url, "tml-experts") as service,
    ):
        training: tinker.TrainingClient = service.create_lora_training_client(model, rank=4, seed=1).result(60)
        for call in (training.forward, training.forward_backward):
            assert balance_of(call(data, "cross_entropy").result(60).metrics) == pytest.approx(wanted, rel=1e-9)
    assert wanted != pytest.approx(of_chunks[0], rel=1e-3)
    assert {*documented} == {*wanted}
