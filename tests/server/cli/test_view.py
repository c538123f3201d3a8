"""`trainhouse view`: chats, rows and data, with the weights of their tokens."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from trainhouse.server.cli.commands import main
from trainhouse.server.cli.remote.view import coloured
from trainhouse.server.text.viewed_datum import ViewedDatum

from ...live import LiveServer, save_byte_tokenizer

TEMPLATE = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
DATUM = {"model_input": [1, 40, 41], "loss_fn_inputs": {"target_tokens": [40, 41, 42], "advantages": [0.0, -1.0, 2.0]}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import AutoTokenizer

    save_byte_tokenizer(directory := tmp_path_factory.mktemp("tokenizer"))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return str(directory)


def viewed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict]:
    assert main(["view", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["data"]


def test_rows_of_a_file_are_shown_as_they_are_trained_on(
    capsys: pytest.CaptureFixture[str], tokenizer: str, tmp_path: Path
) -> None:
    rows = [{"question": "ab", "answer": answer} for answer in ("x", "yz", "w")]
    (file := tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = viewed(capsys, str(file), f"--tokenizer={tokenizer}", "--skip=1", "--first=1")
    assert [[(each["text"], each["weights"]) for each in one["targets"]] for one in data] == [
        [("a", 0), ("b", 0), ("</s>", 0), ("<s>", 0), ("y", 1), ("z", 1), ("</s>", 1)]
    ]
    assert main(["view", str(file), f"--tokenizer={tokenizer}", "--first=1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "datum 0: 6 tokens, 2 trained on, sum of weights 2"
    assert lines[-1].split() == ["5", "2", '"</s>"', "1"]


def test_a_datum_and_a_whole_request_are_shown(
    capsys: pytest.CaptureFixture[str], shared_server: LiveServer, tmp_path: Path
) -> None:
    flags = [f"--base-url={shared_server.url}", "--api-key=tml-view", "--model=tiny/chat"]
    (one,) = viewed(capsys, json.dumps(DATUM), *flags)
    assert one["first_text"] == "<s>" and [each["advantages"] for each in one["targets"]] == [0, -1, 2]
    (file := tmp_path / "request.json").write_text(json.dumps({"forward_backward_input": {"data": [DATUM, DATUM]}}))
    assert viewed(capsys, str(file), *flags) == [one, one]
    (without,) = viewed(capsys, json.dumps(DATUM))
    assert [each["text"] for each in without["targets"]] == ["40 ", "41 ", "42 "]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the datum is not JSON"),
        ("[1]", "the datum is '1': expected a datum, a chat or a row"),
        ('{"messages": []}', "a chat or a row needs a tokenizer: name a served model with --model"),
        ('{"model_input": ["a"]}', "data[0]"),
        ("EMPTY", "rows.csv has no datum, chat or row"),
        ("CSV", "rows.csv, line 1 is not JSON: Expecting value: line 1 column 1 (char 0); view takes JSON, or a file"),
        ("/no/such.jsonl", "/no/such.jsonl: No such file or directory"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    capsys: pytest.CaptureFixture[str], text: str, message: str, tmp_path: Path
) -> None:
    if (content := {"EMPTY": "\n", "CSV": "question,answer\n"}.get(text)) is not None:
        (file := tmp_path / "rows.csv").write_text(content)
        text = str(file)
    assert main(["view", text]) == 1
    assert message in capsys.readouterr().err


def test_colours_show_the_sign_and_the_size_of_advantages() -> None:
    columns = {"advantages": [0.0, -1.0, 2.0], "weights": [1.0, 1.0, 1.0]}
    text = coloured(ViewedDatum([1, 2, 3], [2, 3, 4], "a", ["b", "c", "d\n"], columns))
    output = io.StringIO()
    Console(file=output, force_terminal=True, color_system="truecolor").print(text)
    shown = output.getvalue()
    assert "\x1b[2ma" in shown and "\x1b[2mb" in shown, "tokens that are only read are dim"
    assert "48;2;145;0;0mc" in shown, "half as strong as the largest, and negative"
    assert "48;2;0;100;0md↵" in shown
