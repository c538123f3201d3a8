"""Commands that work through a running server: what they print, their exit statuses, and where they find the server."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from trainhouse import AdamParams, Datum, ServiceClient
from trainhouse.server.cli.commands import main
from trainhouse.server.cli.output import for_terminal, print_table
from trainhouse.server.cli.remote.watching import RunReader, curve

from ...live import LiveServer
from ..api import needs_openai

MODEL = "tiny/chat"
KEY = "tml-command-line"
NUM_STEPS = 6


@pytest.fixture
def at_server(shared_server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINHOUSE_BASE_URL", shared_server.url)
    monkeypatch.setenv("TRAINHOUSE_API_KEY", KEY)


@pytest.fixture(scope="module")
def run(shared_server: LiveServer) -> Iterator[str]:
    """A run with some steps, metrics of its own and two checkpoints."""
    tokens = list(range(3, 30))
    datum = Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": [1.0] * 26})
    with ServiceClient(shared_server.url, KEY, project_id="letters", display_name="first try") as service:
        client = service.create_lora_training_client(MODEL, rank=2)
        for step in range(NUM_STEPS):
            client.forward_backward([datum], "cross_entropy")
            client.optim_step(AdamParams(learning_rate=1e-3)).result(60)
            client.log({"reward": step / NUM_STEPS}).result(60)
        client.save_state("state").result(60)
        client.save_weights_for_sampler("sampler").result(60)
        # Ended operations reach the history in batches.
        history = f"{shared_server.url}/api/v1/training_runs/{client.model_id}/operations"
        deadline = time.monotonic() + 20
        while not _has_saved_sampler(history) and time.monotonic() < deadline:
            time.sleep(0.05)
        yield client.model_id


def _has_saved_sampler(history: str) -> bool:
    operations = httpx.get(history, headers={"X-API-Key": KEY}).raise_for_status().json()["operations"]
    return any(each["kind"] == "save_weights_for_sampler" for each in operations)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def found(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    return json.loads(said(capsys, *arguments, "--json"))


@pytest.mark.usefixtures("at_server")
def test_runs_are_listed_and_shown(capsys: pytest.CaptureFixture[str], run: str) -> None:
    assert run in [each["training_run_id"] for each in found(capsys, "runs", "list")["training_runs"]]
    assert any(line.startswith(run) and MODEL in line for line in said(capsys, "runs", "list").splitlines())
    session = run.partition(":")[0]
    assert [
        each["training_run_id"] for each in found(capsys, "runs", "list", f"--search={session}")["training_runs"]
    ] == [run]
    assert not found(capsys, "runs", "list", "--search=no such run")["training_runs"]
    assert found(capsys, "runs", "show", run)["lora_rank"] == 2
    assert f"tinker://{run}/weights/state" in said(capsys, "runs", "show", run)
    operations = found(capsys, "runs", "operations", run, "--limit=2")["operations"]
    assert [each["kind"] for each in operations] == ["save_weights_for_sampler", "save_weights"]
    assert session in found(capsys, "sessions", "list")["sessions"]
    assert run in said(capsys, "sessions", "show", session)


def test_names_of_sessions_are_listed(capsys: pytest.CaptureFixture[str], at_server: None, run: str) -> None:
    assert re.search(rf"{run} +first try +{MODEL}", said(capsys, "runs", "list"))
    assert re.search(rf"{run.partition(':')[0]} +first try", said(capsys, "sessions", "list"))
    assert "first try" in said(capsys, "runs", "show", run)
    url = f"{os.environ['TRAINHOUSE_BASE_URL']}/api/v1/training_runs"
    for project_id, found in (("letters", [run]), ("others", [])):
        listed = httpx.get(url, params={"project_id": project_id}, headers={"X-API-Key": KEY}).json()["training_runs"]
        assert [one["training_run_id"] for one in listed] == found


@pytest.mark.parametrize("form", ["{flags} runs list", "runs {flags} list", "runs list {flags}"])
def test_flags_that_name_a_server_stand_anywhere(
    capsys: pytest.CaptureFixture[str], shared_server: LiveServer, run: str, form: str
) -> None:
    flags = f"--base-url {shared_server.url} --api-key={KEY} --json"
    assert json.loads(said(capsys, *form.format(flags=flags).split()))["training_runs"][0]["training_run_id"] == run


def test_commands_without_a_server_take_no_flags_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--base-url", "http://127.0.0.1:9", "keys", "list"]) == 2
    assert "No such option: --base-url" in capsys.readouterr().err
    assert main(["--base-url"]) == 2 and main(["--json"]) == 2


@pytest.mark.usefixtures("at_server")
def test_metrics_are_printed_and_written_as_csv(capsys: pytest.CaptureFixture[str], run: str, tmp_path: Path) -> None:
    assert found(capsys, "runs", "metrics", run)["training"]["steps"] == list(range(1, NUM_STEPS + 1))
    text = said(capsys, "runs", "metrics", run, f"--csv={tmp_path}/metrics.csv")
    assert len(text.splitlines()) == NUM_STEPS + 1
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert lines[0] == "series,step,time,metric,value"
    assert sum(',"reward",' in line for line in lines) == NUM_STEPS


@pytest.mark.usefixtures("at_server")
def test_a_watched_run_prints_a_line_for_each_step_to_a_pipe(capsys: pytest.CaptureFixture[str], run: str) -> None:
    lines = [json.loads(line) for line in said(capsys, "runs", "watch", run, "--once", "--json").splitlines()]
    trained = [line for line in lines if line["series"] == "training"]
    assert [line["step"] for line in trained] == list(range(1, NUM_STEPS + 1))
    assert "reward" in next(line for line in lines if line["series"] == "logged")["metrics"]
    text = said(capsys, "runs", "watch", run, f"--steps={NUM_STEPS}", "--metric=loss:mean", "--metric=reward")
    assert text.splitlines()[0].startswith("step 1  loss:mean ")


def test_a_run_is_read_in_parts_without_gaps_or_doubles(shared_server: LiveServer, run: str) -> None:
    with ServiceClient(shared_server.url, KEY) as service:
        rest = service.create_rest_client()
        whole = rest.get_metrics(run).result()
        get = rest.get_metrics
        rest.get_metrics = lambda run, after, logged: get(run, after, logged, limit=4)
        reader = RunReader(rest, run)
        for _ in range(3):
            assert reader.read().model_dump() == whole.model_dump()


@pytest.mark.usefixtures("at_server")
def test_checkpoints_are_managed(capsys: pytest.CaptureFixture[str], run: str, tmp_path: Path) -> None:
    path = f"tinker://{run}/weights/state"
    assert path in said(capsys, "checkpoints", "list")
    assert found(capsys, "checkpoints", "show", path)["base_model"] == MODEL
    assert said(capsys, "checkpoints", "publish", path) == f"{path}: published\n"
    assert [each["public"] for each in found(capsys, "checkpoints", "list", f"--run={run}")["checkpoints"]] == [
        True,
        False,
    ]
    said(capsys, "checkpoints", "unpublish", path)
    said(capsys, "checkpoints", "ttl", path, "7200")
    assert found(capsys, "checkpoints", "list", f"--run={run}")["checkpoints"][0]["expires_at"]
    copied = said(capsys, "checkpoints", "copy", path).strip()
    files = found(capsys, "checkpoints", "download", copied, str(tmp_path / "new"))["files"]
    assert all(Path(file).is_file() for file in files)
    exported = found(capsys, "export", copied, str(tmp_path / "exported"))
    assert "PeftModel.from_pretrained" in exported["note"]
    imported = said(capsys, "import", str(tmp_path / "exported"), "--name=again").strip()
    assert main(["checkpoints", "delete", imported]) == 1, "no one confirmed it"
    said(capsys, "checkpoints", "delete", imported, "--yes")
    assert main(["checkpoints", "delete", imported, "--yes", "--json"]) == 5
    captured = capsys.readouterr()
    assert json.loads(captured.out)["status"] == 5 and captured.err.count("\n") == 1


@needs_openai
@pytest.mark.usefixtures("at_server")
def test_texts_are_sampled_from_models_and_checkpoints(capsys: pytest.CaptureFixture[str], run: str) -> None:
    flags = ("--max-tokens=4", "--temperature=0")
    for model in (MODEL, f"tinker://{run}/sampler_weights/sampler"):
        whole = found(capsys, "sample", model, "the", *flags, "--logprobs")["choices"][0]
        assert len(whole["logprobs"]["token_logprobs"]) == 4
        assert said(capsys, "sample", model, "the", *flags) == whole["text"] + "\n"
    two = found(capsys, "sample", MODEL, "the", "-n", "2", *flags)["choices"]
    assert said(capsys, "sample", MODEL, "the", "-n", "2", *flags).split("\n---\n")[0] == two[0]["text"]


@needs_openai
@pytest.mark.usefixtures("at_server")
def test_a_chat_keeps_its_messages(capsys: pytest.CaptureFixture[str], run: str) -> None:
    model, flags = f"tinker://{run}/sampler_weights/sampler", ("--max-tokens=4", "--temperature=0")
    chat = found(capsys, "chat", model, "--system=short", "-m", "one", "-m", "two", *flags)["messages"]
    assert [each["role"] for each in chat] == ["system", "user", "assistant", "user", "assistant"]
    printed = said(capsys, "chat", model, "--system=short", "-m", "one", "-m", "two", *flags)
    assert printed == "".join(each["content"] + "\n" for each in chat if each["role"] == "assistant")
    forgotten = found(capsys, "chat", model, "--system=short", "-m", "one", "-m", "/reset", "-m", "one", *flags)
    assert forgotten["messages"] == chat[:3]


@needs_openai
def test_a_piped_chat_ends_with_its_input(shared_server: LiveServer) -> None:
    command = [sys.executable, "-m", "trainhouse.server", "chat", MODEL, "--max-tokens=3", "--temperature=0"]
    flags = [f"--base-url={shared_server.url}", f"--api-key={KEY}", "--json"]
    done = subprocess.run(
        [*command, *flags], input="one\ntwo\n", capture_output=True, text=True, timeout=60, check=True
    )
    assert [each["content"] for each in json.loads(done.stdout)["messages"][::2]] == ["one", "two"]


@pytest.mark.usefixtures("at_server")
def test_limits_and_workers_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert found(capsys, "usage")["runs"]["limit"] == 2000
    assert "512.0 MiB" in said(capsys, "usage")
    assert found(capsys, "workers")["groups"][MODEL]["base_weights"] > 0
    assert "base_weights" in said(capsys, "workers")


@pytest.mark.usefixtures("at_server")
@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["runs", "show", "none"], 5, "no training run none exists: list yours with `trainhouse runs list`"),
        pytest.param(["sample", "none", "x"], 5, "model none does not exist", marks=needs_openai),
        pytest.param(["chat", "none", "-m", "x"], 5, "model none does not exist", marks=needs_openai),
        (["runs", "list", "--api-key=wrong"], 4, "the API key does not start with tml-"),
        (["usage", "--base-url=http://127.0.0.1:9"], 3, "Connection refused"),
        (["sample", "m", "x", "--base-url=http://127.0.0.1:9"], 3, "Connection refused"),
        (["runs", "list", "--limit=0"], 2, "--limit"),
        (["runs", "--limit=2", "list"], 2, "(usage: trainhouse runs COMMAND [ARGS]... [OPTIONS])"),
        (["sample", "--model=m", "x"], 2, "No such option: --model (usage: trainhouse sample [OPTIONS] {MODEL}"),
        (["runs", "lst"], 2, "No such command 'lst'. Did you mean 'list'?"),
        (["checkpoints", "show", "no-path"], 1, "'no-path' is not a checkpoint path"),
    ],
)
def test_a_failure_has_a_status_for_scripts(
    capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, message: str
) -> None:
    assert main([*arguments, "--json"]) == status
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.startswith(f"trainhouse {arguments[0]}: error: ")
    assert len(captured.err.splitlines()) == 1
    answer = json.loads(captured.out)
    assert answer["status"] == status and message in answer["error"]


# Profiles


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file = tmp_path / "trainhouse" / "profiles.toml"
    file.parent.mkdir()
    return file


def write(file: Path, text: str, mode: int = 0o600) -> None:
    file.write_text(text)
    file.chmod(mode)


def test_a_profile_names_a_server(
    capsys: pytest.CaptureFixture[str], shared_server: LiveServer, profiles: Path, run: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("TRAINHOUSE_BASE_URL", "http://127.0.0.1:9")  # a profile overrides the environment
    monkeypatch.setenv("TRAINHOUSE_API_KEY", "tml-of-another-server")
    write(profiles, f'[here]\nbase_url = "{shared_server.url}"\napi_key = "{KEY}"\n')
    assert run in said(capsys, "runs", "list", "--profile=here")


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ('[a]\nbase_url = "http://h"\napi_key = "tml-x"\n', 0o644, "others may read it (mode 644): chmod 600"),
        ('[b]\nbase_url = "http://h"\napi_key = "tml-x"\n', 0o600, "has no profile 'a' with a base_url"),
        ('[a]\nbase_url = "http://h"\n', 0o600, "has no api_key for this URL"),
        ("[a", 0o600, "is not valid TOML"),
        (None, 0o600, "does not exist"),
    ],
)
def test_an_unusable_profile_is_refused(
    capsys: pytest.CaptureFixture[str], profiles: Path, text: str | None, mode: int, message: str
) -> None:
    if text is not None:
        write(profiles, text, mode)
    assert main(["runs", "list", "--profile=a"]) == 1
    assert message in capsys.readouterr().err


def test_a_profiles_key_is_sent_to_no_other_url(capsys: pytest.CaptureFixture[str], profiles: Path) -> None:
    write(profiles, '[a]\nbase_url = "http://127.0.0.1:9"\napi_key = "tml-secret"\n')
    assert main(["runs", "list", "--profile=a", "--base-url=http://127.0.0.1:10"]) == 1
    assert "has no api_key for this URL" in capsys.readouterr().err
    assert main(["runs", "list", "--profile=a", "--base-url=http://127.0.0.1:9"]) == 3


# On a terminal


def test_control_characters_reach_a_pipe_but_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "a\x1b[2J\x9b\tb\n"
    assert for_terminal(text) == text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert for_terminal(text) == "a\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}\tb\n"
    print_table(("RUN",), [("s:train:0",), ("\x1b]0;x",)])
    shown = capsys.readouterr().out
    assert "s:train:0" in shown and "\x1b]0" not in shown


# Curves


def test_a_curve_shows_a_falling_line() -> None:
    lines = list(curve(range(1, 101), [float(100 - step) for step in range(100)], width=40, height=6))
    assert [line.split()[0] for line in (lines[0], lines[4])] == ["100", "1"]
    assert lines[-1].split() == ["step", "1", "100"]
    at = [line[11:] for line in lines[:-1]]
    assert all(len(line) == 29 for line in at)
    first = [next(column for column, cell in enumerate(line) if cell != chr(0x2800)) for line in at]
    assert first == sorted(first) and first[0] == 0 and first[-1] > 20


@pytest.mark.parametrize("values", [[], [None], [float("nan")]])
def test_a_curve_without_values_says_so(values: list[float | None]) -> None:
    assert list(curve(range(len(values)), values, 40, 6)) == ["no values yet"]


def test_constant_values_are_drawn() -> None:
    assert any(cell > chr(0x2800) for cell in "".join(list(curve([1, 2], [3.0, 3.0], 40, 6))[:-1]) if cell > "~")


# Completion


def test_commands_and_flags_are_completed() -> None:
    code = "import os, sys; from trainhouse.server.cli.commands import main; sys.exit(main([]))"

    def completed(words: str) -> str:
        environment = {
            "_TRAINHOUSE_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
        }
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
        return done.stdout

    assert {"runs", "serve"} <= set(completed("trainhouse ").split())
    assert completed("trainhouse runs wa").split() == ["watch"]
    assert "--max-lora-rank" in completed("trainhouse serve --max-lo").split()
