"""The names that `import trainhouse` offers."""

import subprocess
import sys

import pytest
import trainhouse
from trainhouse import client
from trainhouse.client.data import as_tokens
from trainhouse.client.rest import checkpoint_address, path_inside


def test_the_package_offers_the_client_and_nothing_else() -> None:
    for name in ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "Datum", "AuthenticationError"):
        assert getattr(trainhouse, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = trainhouse.Nonsense


def test_a_star_import_gives_all_of_the_clients_names() -> None:
    given: dict[str, object] = {}
    exec("from trainhouse import *", given)
    public = {name for name, value in vars(client).items() if isinstance(value, type) and not name.startswith("_")}
    assert set(given) - {"__builtins__"} == public
    assert given["ServiceClient"] is client.ServiceClient


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, trainhouse; print({'httpx', 'numpy', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


def test_a_checkpoint_path_is_an_address_of_three_parts() -> None:
    address = checkpoint_address("tinker://s:train:0/sampler_weights/best")
    assert address == "training_runs/s:train:0/checkpoints/sampler_weights/best"
    for wrong in ("s:train:0/weights/best", "tinker://s:train:0/best", "tinker://s/weights/a/b"):
        with pytest.raises(ValueError, match="not a checkpoint path"):
            checkpoint_address(wrong)


def test_a_download_stays_inside_its_directory(tmp_path) -> None:
    assert path_inside(tmp_path, "a/b.json") == (tmp_path / "a/b.json").resolve()
    with pytest.raises(ValueError, match="outside"):
        path_inside(tmp_path, "../b.json")


def test_a_string_is_refused_as_a_prompt() -> None:
    with pytest.raises(
        ValueError, match=r"'Once upon a time' is a string: pass its token ids, get_tokenizer\(\)\.encode"
    ):
        as_tokens("Once upon a time")  # pyright: ignore[reportArgumentType]
    assert as_tokens((1, 2)) == [1, 2]
