"""The server on which the documentation's code runs."""

from collections.abc import Iterator

import pytest

from ..live import CHATML, LiveServer, live_server, save_byte_tokenizer
from ..tiny import tiny_model


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Serves "tiny/chat", whose chat template ends each turn with a token, as those of real models do."""
    model = tiny_model("llama", tmp_path_factory.mktemp("chat"))
    save_byte_tokenizer(model, ("<|im_start|>", "<|im_end|>"))
    (model / "chat_template.jinja").write_text(CHATML)
    with live_server({"tiny/chat": model}, tmp_path_factory.mktemp("state")) as server:
        yield server
