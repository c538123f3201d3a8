"""The defaults of families are those of transformers' config classes: `make families` writes them again."""

import pytest
from transformers import CONFIG_MAPPING, Qwen3Config

from ...family_defaults import FILE, fields_of, text


def test_the_file_of_defaults_is_what_transformers_declares() -> None:
    assert FILE.read_text("utf-8") == text(), "transformers has other defaults: run `make families`, then the tests"


def test_another_default_of_transformers_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Changed(Qwen3Config):
        head_dim: int = 64

    assert fields_of(Changed) == {**fields_of(Qwen3Config), "head_dim": 64}
    monkeypatch.setitem(CONFIG_MAPPING._mapping, "qwen3", "Changed")
    monkeypatch.setitem(CONFIG_MAPPING._extra_content, "qwen3", Changed)
    assert FILE.read_text("utf-8") != text()
