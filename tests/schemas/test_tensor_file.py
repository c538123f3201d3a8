"""safetensors files are read and written as by the package of that name."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from trainhouse.schemas.adapters.tensor_file import FileTensor, TensorFile, write_tensors


def saved(path: Path) -> dict[str, torch.Tensor]:
    tensors = {
        "b.half": torch.randn(3, 5).half(),
        "a.brain": torch.randn(2, 3, 4).bfloat16(),
        "single": torch.randn(7),
        "none": torch.empty(0, 4),
        "counts": torch.arange(6).view(2, 3),
        "small": torch.randn(2, 2).to(torch.float8_e4m3fn),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    return tensors


def test_tensors_are_read(tmp_path: Path) -> None:
    tensors = saved(tmp_path / "file.safetensors")
    file = TensorFile(tmp_path / "file.safetensors")
    assert file.keys() == tensors.keys() and file.metadata == {"format": "pt"}
    for name in ("b.half", "single", "none"):
        assert np.array_equal(file[name], tensors[name].numpy())
    assert np.array_equal(file["a.brain"], tensors["a.brain"].view(torch.uint16).numpy())
    with pytest.raises(ValueError, match=r"small of .* has dtype F8_E4M3: only F32, F16, BF16 are read"):
        file["small"]


def test_tensors_are_written(tmp_path: Path) -> None:
    tensors = saved(tmp_path / "file.safetensors")
    file = TensorFile(tmp_path / "file.safetensors")
    parts = [np.full((2, 2), number, np.float32) for number in range(3)]
    written = {name: file.copied(name) for name in file} | {
        "stacked": FileTensor.stacked(parts),
        "transposed": FileTensor.of(np.arange(6, dtype=np.float32).reshape(2, 3).T),
    }
    write_tensors(tmp_path / "file.safetensors", written, file.metadata)  # in the place of the one that is open
    found = load_file(tmp_path / "file.safetensors")
    assert found.keys() == written.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(
            found[name].view(torch.uint8), tensor.view(torch.uint8)
        )
    assert torch.equal(found["stacked"], torch.arange(3.0).view(3, 1, 1).expand(3, 2, 2))
    assert torch.equal(found["transposed"], torch.arange(6.0).view(2, 3).T)
    assert [path.name for path in tmp_path.iterdir()] == ["file.safetensors"]


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    saved(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="shorter than its header says"):
        TensorFile(path)
    for damaged in (b"", whole[:20], b"\xff" * 64):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="not a safetensors file"):
            TensorFile(path)
