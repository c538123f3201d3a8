"""The command line: help, one-line refusals, API keys, and real server processes."""

import json
import logging
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import httpx
import psutil
import pytest
from packaging.requirements import Requirement
from trainhouse import ServiceClient, __version__
from trainhouse.server.cli.commands import main
from trainhouse.server.cli.output import spinner
from trainhouse.server.cli.serve import serve_help, serve_help_all
from trainhouse.server.config.server_config import OPTIONS, SECTIONS
from trainhouse.server.serving.server_process import FORCED_STATUS
from trainhouse.workers.protocol.log_lines import LineFormatter

from ...letters import save_letter_tokenizer
from ...live import LiveServer, live_server
from ...lock import declared

SOON_SECONDS = 30


@pytest.fixture(autouse=True)
def no_log_on_a_closed_stream() -> Iterator[None]:
    """Removes the handlers of commands that a test ran in this process, which write to the test's captured stream."""
    yield
    root = logging.getLogger()
    for handler in [each for each in root.handlers if isinstance(each.formatter, LineFormatter)]:
        root.removeHandler(handler)


def trainhouse(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trainhouse.server", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | environment,
    )


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Returns the one line on standard error of a command that must be refused."""
    assert main(arguments) != 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    return captured.err


# Help and refusals


def test_the_help_of_serve_fits_one_screen() -> None:
    lines = serve_help().splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80


def test_the_full_help_names_every_option() -> None:
    text = serve_help_all()
    for option in OPTIONS.values():
        assert f"  {option.flag} " in text
    headings = [line[1:-1] for line in text.splitlines() if line.startswith("[")]
    assert headings == list(SECTIONS)
    assert max(map(len, text.splitlines())) <= 120
    assert "(2592000)" in text, "large defaults are written out"


@pytest.mark.parametrize("flag", ["--help", "-h", "--help-all"])
def test_help_ends_with_success(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", flag]) == 0
    assert capsys.readouterr().out.startswith("usage: trainhouse serve")


def test_output_that_is_not_read_to_its_end_is_no_error() -> None:
    command = [sys.executable, "-m", "trainhouse.server", "serve", "--help-all"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"trainhouse {__version__}\n"


def test_wrong_usage_is_refused_in_one_line_with_status_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["serve", "--base-model", "x", "--prt", "1"]) == 2
    assert "unknown argument --prt: did you mean --port?" in capsys.readouterr().err
    assert "--base-model is not given: expected at least one NAME[=PATH_OR_HUB_ID]" in refusal(capsys, "serve")
    assert "there is no /no/such" in refusal(capsys, "serve", "--base-model", "a=/no/such")
    missing = str(tmp_path / "missing.toml")
    assert "missing.toml cannot be read" in refusal(capsys, "serve", "--config", missing)


def start_refusal(capsys: pytest.CaptureFixture[str], tmp_path: Path, *flags: str) -> str:
    return refusal(capsys, "serve", "--base-model=x/y", f"--state-dir={tmp_path}", "--port=0", *flags)


def test_a_port_in_use_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        message = start_refusal(capsys, tmp_path / "new", f"--port={port}")
    assert not (tmp_path / "new").exists()
    assert f"cannot listen on 127.0.0.1 port {port}: something listens there already" in message


def test_an_address_of_another_machine_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "this machine has no such address" in start_refusal(capsys, tmp_path, "--host=203.0.113.1")


def test_a_public_address_needs_an_api_key(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    message = start_refusal(capsys, tmp_path, "--host=0.0.0.0")
    assert f"no API key is in force: make one with `trainhouse keys create NAME --state-dir {tmp_path}`" in message


def test_tenant_weights_too_far_apart_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    message = start_refusal(capsys, tmp_path, "--tenant-weights=alice=1e9")
    assert "tenant weights range from 1 to 1e+09: the heaviest may be 1000 times the lightest" in message


def test_a_state_directory_that_is_a_file_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot be used: File exists" in start_refusal(capsys, tmp_path / "file")


@pytest.mark.skipif(any(Path("/dev").glob("nvidia*")), reason="there is a CUDA device")
def test_a_missing_device_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    message = start_refusal(capsys, tmp_path, "--device=cuda")
    assert "device cuda: this machine, or this build of torch (" in message and "serve with --device cpu" in message


@pytest.mark.slow
def test_a_directory_without_a_model_is_refused_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    done = trainhouse("serve", f"--base-model=m={tmp_path}/model", "--port=0", f"--state-dir={tmp_path}/state")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("trainhouse serve: error: ")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_failed_start_of_ray_is_reported_in_one_line(tmp_path: Path) -> None:
    """Ray puts its sockets into the temporary directory, whose path is too long for them here."""
    flags = ("--base-model=x/y", "--pool=ray", "--port=0", f"--state-dir={tmp_path}")
    with tempfile.TemporaryDirectory(prefix="long" * 12, dir="/tmp") as directory:
        done = trainhouse("serve", *flags, TMPDIR=directory)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("trainhouse serve: error: no Ray cluster could be started on this machine: ")
    assert "AF_UNIX path" in line and line.endswith(", or serve with --pool local, which needs none")


def test_wrong_demo_flags_are_refused_before_loading() -> None:
    done = trainhouse("demo", "--bogus", "3")
    assert done.returncode == 2
    assert "No such option: --bogus" in done.stderr
    assert "--steps" in trainhouse("demo", "--help").stdout


# Keys


def test_keys_are_created_listed_and_revoked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    place = f"--state-dir={tmp_path}"
    assert main(["keys", "create", "alice", place]) == 0
    key = capsys.readouterr().out.strip()
    assert key.startswith("tml-")
    assert main(["keys", "list", place]) == 0
    listed = capsys.readouterr().out
    assert "alice" in listed and key not in listed
    number = listed.splitlines()[-1].split()[0]
    assert main(["keys", "revoke", number, place]) == 0
    assert "is revoked" in capsys.readouterr().out
    assert "there is no key" in refusal(capsys, "keys", "revoke", number, place)
    assert key.encode() not in b"".join(file.read_bytes() for file in tmp_path.iterdir())


def test_the_first_key_warns_that_made_up_keys_stop_working(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name, is_first in (("alice", True), ("bob", False)):
        assert main(["keys", "create", name, f"--state-dir={tmp_path}"]) == 0
        captured = capsys.readouterr()
        assert len(captured.out.splitlines()) == 1, "the key alone: scripts read it"
        assert ("on this state directory made-up tml- keys no longer work" in captured.err) is is_first


def test_invalid_key_names_and_numbers_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    place = f"--state-dir={tmp_path}"
    assert "'a=b' cannot be the name of a key" in refusal(capsys, "keys", "create", "a=b", place)
    message = refusal(capsys, "keys", "revoke", "erin", place)
    assert "'erin' is not the number of a key: give the one that `trainhouse keys list` shows" in message


# The database that a state directory belongs to


@pytest.mark.parametrize(
    "command",
    [
        ["serve", "--base-model=x/y", "--port=0"],
        ["keys", "list"],
        ["keys", "create", "alice"],
        ["keys", "revoke", "1"],
        ["verify"],
        ["verify", "--repair"],
        ["backup", "copy"],
    ],
    ids=" ".join,
)
def test_postgresql_state_is_left_alone_without_a_database_url(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    state = tmp_path / "state"
    weights = state / "live-3" / "ephemeral" / "one" / "weights"
    weights.parent.mkdir(parents=True)
    weights.touch()
    (state / "url_secret").touch()
    before = sorted(tmp_path.rglob("*"))
    message = refusal(capsys, *command, f"--state-dir={state}")
    assert f"{state} belongs to servers on PostgreSQL (it has live-3): give --database-url" in message
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "command", [["serve", "--base-model=x/y", "--port=0"], ["verify", "--repair"], ["backup", "c"]]
)
def test_sqlite_state_is_left_alone_by_servers_on_postgresql(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trainhouse.db").touch()
    message = refusal(capsys, *command, f"--state-dir={tmp_path}", "--database-url=postgresql://nobody@nowhere/none")
    assert "belongs to a server on SQLite (it has trainhouse.db): omit --database-url" in message
    assert list(tmp_path.iterdir()) == [tmp_path / "trainhouse.db"]


@pytest.mark.parametrize("command", [["keys", "list"], ["keys", "revoke", "1"], ["verify"], ["backup", "copy"]])
def test_commands_on_a_missing_state_directory_create_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "--state-dir" in refusal(capsys, *command, "--state-dir=none")
    (tmp_path / "empty").mkdir()
    assert "--state-dir" in refusal(capsys, *command, "--state-dir=empty")
    assert list(tmp_path.rglob("*")) == [tmp_path / "empty"]


# Real processes


@pytest.fixture(scope="module")
def server(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server({"tiny/qwen3": tiny_models["qwen3"]}, tmp_path_factory.mktemp("cli")) as started:
        yield started


@pytest.mark.slow
def test_the_log_has_the_url_and_the_client_settings(server: LiveServer) -> None:
    assert httpx.get(f"{server.url}/api/v1/healthz").json() == {"status": "ok"}
    log = server.log.read_text()
    assert "loading tiny/qwen3 from" in log
    assert f"ready: {server.url} serves tiny/qwen3" in log
    assert f"export TINKER_BASE_URL={server.url} TINKER_API_KEY=tml-local" in log
    assert f'trainhouse.ServiceClient("{server.url}", "tml-local")' in log


@pytest.mark.slow
def test_a_second_server_on_the_same_state_directory_is_refused(server: LiveServer) -> None:
    done = trainhouse("serve", "--base-model=x/y", "--port=0", f"--state-dir={server.state_dir}")
    assert done.returncode == 1
    assert f"is in use by the server with process id {server.process.pid}" in done.stderr
    (server.state_dir / "server.lock").unlink()
    done = trainhouse("serve", "--base-model=x/y", "--port=0", f"--state-dir={server.state_dir}")
    assert done.returncode == 1
    assert "is in use by a server whose server.lock was removed: stop that one" in done.stderr
    assert httpx.get(f"{server.url}/api/v1/readyz").json()["status"] == "ready"
    assert (server.state_dir / "server.lock").read_text() == f"{server.process.pid}\n", (
        "the running server recreates it"
    )
    assert httpx.get(f"{server.url}/api/v1/healthz").status_code == 200


def descendants(server: LiveServer) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def waiting_poll(server: LiveServer) -> Future[httpx.Response]:
    """Starts a poll for an operation whose predecessor is never submitted."""
    http = httpx.Client(base_url=f"{server.url}/api/v1", headers={"X-API-Key": "tml-x"}, timeout=60)
    session = http.post("/create_session", json={"sdk_version": "0"}).json()["session_id"]
    create = {"session_id": session, "model_seq_id": 0, "base_model": "tiny/qwen3", "lora_config": {"rank": 1}}
    created = http.post("/create_model", json=create).json()["request_id"]
    model_id = http.post("/retrieve_future", json={"request_id": created}).json()["model_id"]
    early = http.post("/optim_step", json={"model_id": model_id, "seq_id": 2, "adam_params": {}}).json()["request_id"]
    return ThreadPoolExecutor(1).submit(http.post, "/retrieve_future", json={"request_id": early})


@pytest.mark.slow
def test_the_first_key_says_how_to_reach_the_runs_of_made_up_keys(
    capsys: pytest.CaptureFixture[str], tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    place = f"--state-dir={tmp_path}"
    with live_server({"tiny/qwen3": tiny_models["qwen3"]}, tmp_path) as server:
        with ServiceClient(server.url, "tml-made-up") as service:
            made = service.create_lora_training_client("tiny/qwen3", rank=1).model_id
        assert main(["keys", "create", "alice", place]) == 0
        said = capsys.readouterr().err
        assert f"of servers with --state-dir {tmp_path}:" in said
        remedy = re.search(r"local-(\w+) \(1\); `trainhouse (keys create local-\1)` makes a key that reaches", said)
        assert remedy, said
        assert main([*remedy[2].split(), place]) == 0
        with ServiceClient(server.url, capsys.readouterr().out.strip()) as service:
            listed = service.create_rest_client().list_training_runs().result().training_runs
        assert [run.training_run_id for run in listed] == [made]


def test_no_command_is_answered_with_where_they_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys).strip() == "trainhouse: error: no command is given: trainhouse --help lists them"
    assert "no command is given: trainhouse keys --help lists them" in refusal(capsys, "keys")


@pytest.mark.slow
def test_an_interrupt_stops_a_server_and_its_workers_with_success(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    with live_server({"tiny/qwen3": tiny_models["qwen3"]}, tmp_path) as server:
        children = descendants(server)
        assert children
        poll = waiting_poll(server)
        time.sleep(1)
        assert not poll.done()
        started = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(SOON_SECONDS) == 0
        assert time.monotonic() - started < SOON_SECONDS
        _, alive = psutil.wait_procs(children, timeout=SOON_SECONDS)
        assert alive == []
        assert poll.result().status_code == 408
        assert "Traceback" not in server.log.read_text()
        assert not (tmp_path / "ready").exists()


@pytest.mark.slow
def test_sigterm_to_the_group_answers_open_requests_without_errors(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """systemd, docker stop on a shell, and a closed terminal all signal the whole group."""
    shutil.copytree(tiny_models["qwen3"], tmp_path / "model")
    save_letter_tokenizer(tmp_path / "model")
    limits = {"drain_seconds": 0, "shutdown_seconds": 2}
    with live_server({"tiny/qwen3": tmp_path / "model"}, tmp_path / "state", **limits) as server:
        asked = {"model": "tiny/qwen3", "prompt": "the", "n": 1000, "max_tokens": 1000, "ignore_eos": True}
        http = httpx.Client(base_url=f"{server.url}/v1", headers={"X-API-Key": "tml-x"}, timeout=60)
        http.post("/completions", json=asked | {"n": 1, "max_tokens": 1}).raise_for_status()
        with ThreadPoolExecutor(2) as threads:
            whole = threads.submit(http.post, "/completions", json=asked)
            stream = threads.submit(http.post, "/completions", json=asked | {"stream": True})
            time.sleep(1)
            assert not whole.done() and not stream.done()
            os.killpg(server.process.pid, signal.SIGTERM)
            assert server.process.wait(SOON_SECONDS) == 0
        assert whole.result().status_code == 503 and "is stopping" in whole.result().json()["error"]["message"]
        assert "is stopping" in json.loads(stream.result().text.split("data: ")[-1])["error"]["message"]
        log = server.log.read_text()
        assert "stopping" in log and not any(word in log for word in ("Traceback", "ERROR", "WARNING"))


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.5, 2.0])
def test_ctrl_c_while_loading_ends_all_processes_with_status_130(
    tiny_models: dict[str, Path], tmp_path: Path, seconds: float
) -> None:
    """Ctrl-C reaches every process of the terminal."""
    flags = ["serve", f"--base-model=tiny/m={tiny_models['qwen3']}", "--port=0", f"--state-dir={tmp_path}"]
    program = [sys.executable, "-u", "-m", "trainhouse.server", *flags]
    process = subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline().startswith("loading")
    time.sleep(seconds)
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    said, errors = process.communicate(timeout=60)
    if "ready: " in said:  # it was ready before the signal
        assert process.returncode == 0 and "Traceback" not in errors
    else:
        assert (process.returncode, errors) == (130, "trainhouse serve: interrupted\n")
    assert psutil.wait_procs(children, timeout=60)[1] == []


@pytest.mark.slow
def test_a_terminal_shows_a_spinner_until_the_server_is_ready(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    flags = ["serve", f"--base-model=tiny/m={tiny_models['qwen3']}", "--port=0", f"--state-dir={tmp_path}"]
    ours, its = pty.openpty()
    program = [sys.executable, "-m", "trainhouse.server", *flags]
    with subprocess.Popen(program, stdin=its, stdout=its, stderr=its, start_new_session=True) as process:
        os.close(its)
        shown = ""
        while "ServiceClient(" not in shown:
            shown += os.read(ours, 4096).decode(errors="replace")
        process.send_signal(signal.SIGINT)
        assert process.wait(SOON_SECONDS) == 0
    os.close(ours)
    before, _, after = shown.partition("ready: http")
    assert " loading \x1b[33m0:00:0" in before and "0:00:0" not in after
    assert "\x1b[2Kloading tiny/m from" in before, "what is printed meanwhile has a line of its own"
    assert before.endswith("\x1b[2K") and "\x1b[?25h" in before, "the spinner is gone, and the cursor is not"


def test_a_terminal_shows_how_much_is_done_as_soon_as_that_is_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with spinner("copying a"):
        pass
    before = capsys.readouterr().err
    with spinner("copying a") as show:
        show(1_999_999, 3_000_000)
    during = capsys.readouterr().err
    with spinner("copying a") as show:
        show(1_999_999, 3_000_000)
        show(3_000_000, 3_000_000)
    after = capsys.readouterr().err.rpartition("copying")[2]
    assert "copying a: 66 % of 2.9 MiB" in during and "%" not in before and "%" not in after


@pytest.mark.slow
def test_sigterm_while_loading_stops_the_server_and_its_workers(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    arguments = ["serve", f"--base-model=m={tiny_models['qwen3']}", "--port=0", f"--state-dir={tmp_path}"]
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "trainhouse.server", *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("loading")
    time.sleep(0.5)
    children = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    assert "ready:" not in process.stdout.read()
    process.stdout.close()
    assert process.wait(SOON_SECONDS) == 0
    assert psutil.wait_procs(children, timeout=SOON_SECONDS)[1] == []


STUBBORN = """
import asyncio, os, signal
from trainhouse.server.serving.server_process import until_signal

async def work(on_ready):
    on_ready()
    os.kill(os.getpid(), signal.SIGINT)
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)

asyncio.run(until_signal(work))
"""


@pytest.mark.slow
def test_a_second_interrupt_ends_a_process_that_does_not_stop() -> None:
    assert subprocess.run([sys.executable, "-c", STUBBORN], timeout=30).returncode == FORCED_STATUS


# Imports

MODULES = """
import importlib, pkgutil, sys, trainhouse.client, trainhouse.schemas, trainhouse.server
for package in (trainhouse.client, trainhouse.schemas, trainhouse.server):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
print(sorted({"torch", "ray", "transformers"} & set(sys.modules)), len(sys.modules) > 500)
"""


def test_other_packages_log_warnings_but_no_info() -> None:
    code = (
        "import logging; from trainhouse.server.logs.setup import configure_logging; configure_logging('info')\n"
        "for name in ('aiobotocore.credentials', 'botocore.hooks', 'trainhouse.server'):\n"
        "    logging.getLogger(name).info('noted'); logging.getLogger(name).warning('warned')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stderr.count("noted"), done.stderr.count("warned")) == (1, 3)


@pytest.mark.slow
def test_no_module_of_server_client_or_schemas_loads_torch() -> None:
    done = subprocess.run([sys.executable, "-c", MODULES], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[] True"


# A client-only install


def closure(requirements: list[str], found: frozenset[str] = frozenset()) -> frozenset[str]:
    """Returns the names of all packages that these requirements install, without extras."""
    for requirement in map(Requirement, requirements):
        name = requirement.name.lower().replace("_", "-")
        if name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found = closure(metadata.requires(name) or [], found | {name})
    return found


def run_client_only(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command with only those packages that `pip install trainhouse` installs."""
    installed = closure(declared()[""]) | {"trainhouse"}
    assert "httpx" in installed and "fastapi" not in installed
    missing = [
        module
        for module, packages in metadata.packages_distributions().items()
        if not installed & {package.lower().replace("_", "-") for package in packages}
    ]
    hook = f"import sys; sys.modules.update(dict.fromkeys({missing!r}))"
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "sitecustomize.py").write_text(hook)
        return trainhouse(*arguments, PYTHONPATH=directory)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--help"], 0, "Usage: trainhouse [OPTIONS] COMMAND"),
        (["--version"], 0, f"trainhouse {__version__}"),
        (["export", "--help"], 0, "Usage: trainhouse export"),
        (["import", "--help"], 0, "Usage: trainhouse import"),
        (["plan", "--help"], 0, "Usage: trainhouse plan"),
        (["export", "tinker://a/weights/b", "DIRECTORY", "--base-url=http://127.0.0.1:9"], 3, "(Connection refused)"),
        (["usage", "--base-url=http://127.0.0.1:9"], 3, "(Connection refused)"),
        (["view", '{"model_input": [1, 2]}'], 0, "datum 0: 2 tokens"),
        (["doctor"], 1, "pip install 'trainhouse[server]'"),
        (["serve", "--base-model=a/b"], 1, "pip install 'trainhouse[server]'"),
        (["keys", "list"], 1, "trainhouse keys: error: the package"),
        (["demo"], 1, "pip install 'trainhouse[server,demo]'"),
        (["srve"], 2, "No such command 'srve'. Did you mean 'serve'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_client_only_install_runs_client_commands_and_refuses_others(
    arguments: list[str], status: int, said: str, tmp_path: Path
) -> None:
    done = run_client_only(*(str(tmp_path / "new") if each == "DIRECTORY" else each for each in arguments))
    assert done.returncode == status
    assert said in (done.stderr if status else done.stdout)
    assert "Traceback" not in done.stderr and (status != 1 or len(done.stderr.splitlines()) == 1)


@pytest.mark.parametrize("command", ["export", "import"])
def test_an_unreachable_server_is_reported_at_once(command: str, tmp_path: Path) -> None:
    """Programs retry for five minutes to outlast a restart; the command line does not keep a person waiting."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("{}")
    given = {"export": ["tinker://a/weights/b", str(tmp_path / "new")], "import": [str(tmp_path)]}[command]
    done = trainhouse(command, *given, "--base-url=http://127.0.0.1:9")  # killed after a minute
    assert done.returncode == 3
    assert done.stderr == (
        f"trainhouse {command}: error: no answer from http://127.0.0.1:9 (Connection refused): start a server there, or"
        " give another base_url (TRAINHOUSE_BASE_URL)\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://127.0.0.1:99999", "ftp://here", "http://[::1"])
def test_invalid_base_urls_are_refused_by_name(url: str, tmp_path: Path) -> None:
    done = trainhouse("export", "tinker://a/weights/b", str(tmp_path / "new"), f"--base-url={url}")
    assert done.returncode == 3 and f"{url!r} is not a base URL" in done.stderr and len(done.stderr.splitlines()) == 1
