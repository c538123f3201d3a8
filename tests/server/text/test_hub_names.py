"""The names under which the official SDK looks up tokenizers."""

from pathlib import Path

import pytest
from trainhouse.server.text.hub_names import tokenizer_id, warn_unresolved
from trainhouse.workers.protocol.worker_config import ServedModel


@pytest.mark.parametrize(
    ("name", "is_found"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("Qwen/Qwen3-0.6B/mine", True),  # the SDK cuts the variant off
        ("Qwen/Qwen3-0.6B:mine", True),
        ("Qwen3", False),
        ("a/b/c/d", False),
        ("thinkingmachines/one", False),
        ("../model", False),
        ("/", True),
    ],
)
def test_names_that_the_sdk_cannot_find_are_reported(name: str, is_found: bool, tmp_path: Path) -> None:
    assert len(list(warn_unresolved([ServedModel(name, str(tmp_path))], True))) == (not is_found)


def test_a_directory_name_works_only_on_this_machine(tmp_path: Path) -> None:
    model = ServedModel(str(tmp_path), str(tmp_path))
    assert not list(warn_unresolved([model], True)) and len(list(warn_unresolved([model], False))) == 1
    assert tokenizer_id(model, True) == str(tmp_path)


def test_looked_up_names_match_those_of_the_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares with the SDK's own function, with a loader that returns the name it was given."""
    from tinker.lib.public_interfaces import sampling_client
    from trainhouse.server.text.hub_names import _sdk_tokenizer_name
    from transformers.models.auto import tokenization_auto

    monkeypatch.setattr(tokenization_auto.AutoTokenizer, "from_pretrained", lambda name, **_: name)
    for name in ("a/b", "a/b/c", "a", "/models/x", "/srv/models/x", "a/b:c", "a/b/c/d"):
        assert sampling_client._load_tokenizer_from_model_info.__wrapped__(name) == _sdk_tokenizer_name(name)
