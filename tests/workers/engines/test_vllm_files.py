"""Checkpoints are given to vLLM in a form that it reads."""

from pathlib import Path

import pytest
from trainhouse.schemas.adapters.adapter_files import write_for_cookbook
from trainhouse.schemas.adapters.peft import CONFIG, WEIGHTS, pairs_of
from trainhouse.schemas.adapters.tensor_file import TensorFile
from trainhouse.schemas.adapters.vllm_form import VllmForm
from trainhouse.workers.engines.vllm.adapters import VllmVersion, link_files

from ...schemas.test_adapter_files import matrix, stored

pytestmark = pytest.mark.anyio


async def test_matrices_of_experts_are_separate_for_vllm(tmp_path: Path) -> None:
    """Those of save_weights_external are one tensor for all experts."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir(), target.mkdir()
    paths = {f"model.layers.0.mlp.experts.{number}.up_proj" for number in range(3)}
    stored(source, {path: (matrix(2, 4), matrix(6, 2)) for path in paths}, {})
    write_for_cookbook(source)
    before = (source / WEIGHTS).read_bytes()
    await link_files(source, VllmForm(), VllmVersion("adapter", 1, "adapter-v1", target))
    assert pairs_of(TensorFile(target / WEIGHTS)).keys() == paths
    assert (source / WEIGHTS).read_bytes() == before
    assert (source / CONFIG).samefile(target / CONFIG)
