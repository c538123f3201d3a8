"""End tokens: each that a model's files name ends a chat, and none stands behind a prompt."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers.processors import TemplateProcessing
from trainhouse import ServiceClient
from trainhouse.client.tokenizer import load_directory
from trainhouse.server.cli.commands import main

from ...letters import letter_tokenizer
from ...live import CHATML, LiveServer, live_server
from ...tiny import tiny_model

IN_CONFIG, OF_TOKENIZER, OF_TEMPLATE, IN_GENERATION_CONFIG, OTHER = 2, 3, 0, 7, 9
NAMES = {IN_CONFIG: "</s>", OF_TOKENIZER: "<tool>", OF_TEMPLATE: "<pad>"}
HEADERS = {"X-API-Key": "tml-ends"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny_model("llama", tmp_path_factory.mktemp("ends"))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": IN_GENERATION_CONFIG}))
    tokenizer = letter_tokenizer()
    tokenizer.eos_token = NAMES[OF_TOKENIZER]
    tokenizer.chat_template = CHATML.replace("<|im_start|>", "<s>").replace("<|im_end|>", NAMES[OF_TEMPLATE])
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        ["<s>", "$A", "<tool>"], ["<s>", "$A", "$B", "<tool>"], [("<s>", 1), ("<tool>", OF_TOKENIZER)]
    )
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server({"tiny/ends": model}, tmp_path_factory.mktemp("state")) as running:
        yield running


def answer(server: LiveServer, path: str, **fields: Any) -> Mapping[str, Any]:
    asked = {"prompt": "once"} if path == "completions" else {"messages": [{"role": "user", "content": "once"}]}
    body = {"model": "tiny/ends", "max_tokens": 4, **asked, **fields}
    response = httpx.post(f"{server.url}/v1/{path}", json=body, headers=HEADERS, timeout=60)
    return response.raise_for_status().json()["choices"][0] | response.json()


@pytest.mark.parametrize(
    ("path", "ends"),
    [
        ("chat/completions", (IN_CONFIG, OF_TOKENIZER, OF_TEMPLATE, IN_GENERATION_CONFIG)),
        ("completions", (OF_TOKENIZER, IN_GENERATION_CONFIG)),
    ],
)
def test_an_answer_ends_at_each_end_token_of_the_model(server: LiveServer, path: str, ends: tuple[int, ...]) -> None:
    for token in (IN_CONFIG, OF_TOKENIZER, OF_TEMPLATE, IN_GENERATION_CONFIG, OTHER):
        drawn = {"logit_bias": {str(token): 100}, "return_token_ids": True}
        for stop in ({}, {"stop": "never written"}, {"stop_token_ids": [11]}):
            choice = answer(server, path, **drawn, **stop)
            expected = ("stop", [token]) if token in ends else ("length", [token] * 4)
            assert (choice["finish_reason"], choice["token_ids"]) == expected, token
        assert answer(server, path, **drawn, ignore_eos=True)["token_ids"] == [token] * 4


def test_no_end_token_stands_behind_a_prompt(
    server: LiveServer, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    once = letter_tokenizer().encode("once", add_special_tokens=False)
    assert answer(server, "completions", return_token_ids=True)["prompt_token_ids"] == [1, *once]
    assert answer(server, "completions", prompt="", return_token_ids=True)["prompt_token_ids"] == [1]
    chat = answer(server, "chat/completions", return_token_ids=True)["prompt_token_ids"]
    with ServiceClient(server.url, HEADERS["X-API-Key"]) as service:
        tokenizer: Any = service.create_sampling_client("tiny/ends").get_tokenizer()
    for each in (tokenizer, load_directory(str(model))):
        assert each.encode("once") == each("once")["input_ids"] == [1, *once]
        messages = [{"role": "user", "content": "once"}]
        assert each.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) == chat
    flags = [f"--base-url={server.url}", "--api-key=tml-ends", "--json"]
    assert main(["sample", "tiny/ends", "once", "--max-tokens=1", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["usage"]["prompt_tokens"] == 1 + len(once)
