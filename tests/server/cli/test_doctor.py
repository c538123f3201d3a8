"""`trainhouse doctor`, `bench` and `tenants`: what they find, and what they report as a problem."""

import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from trainhouse.server.cli.checkup.machine import devices, disks, installed, port
from trainhouse.server.cli.checkup.self_test import CPU, write_model
from trainhouse.server.cli.commands import main

from ...live import LiveServer, live_server


@pytest.fixture
def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


def diagnosed(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, Any]:
    assert main(["doctor", *arguments, "--json"]) == status
    findings = json.loads(capsys.readouterr().out)["findings"]
    return {f"{each['topic']} {each['name']}": each for each in findings}


@pytest.mark.slow
def test_doctor_finds_nothing_wrong_with_this_machine(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, free_port: str
) -> None:
    found = diagnosed(capsys, "--no-self-test", f"--state-dir={tmp_path}", f"--port={free_port}")
    assert {"installed torch", "devices CPU", "disk durable write", "limits open files"} <= found.keys()
    assert found[f"port 127.0.0.1:{free_port}"]["value"] == "free"
    assert not any(name.startswith("self-test") for name in found)
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"


def test_wrong_configuration_is_a_problem(capsys: pytest.CaptureFixture[str], tmp_path: Path, free_port: str) -> None:
    (file := tmp_path / "server.toml").write_text('base_models = ["a/b"]\nmax_lora_rnk = 3\n')
    flags = ("--no-self-test", f"--config={file}", f"--port={free_port}")
    found = diagnosed(capsys, *flags, status=1)["configuration serve"]
    assert found["status"] == "problem" and "did you mean max_lora_rank?" in found["remedy"]


def test_a_port_in_use_is_a_problem_unless_a_server_of_ours_has_it(shared_server: LiveServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = port("127.0.0.1", listener.getsockname()[1])
    assert (found.status, found.value) == ("problem", "Address already in use")
    own = port("127.0.0.1", int(shared_server.url.rpartition(":")[2]))
    assert (own.status, own.value) == ("ok", "a trainhouse server answers")


def test_a_port_whose_owner_does_not_speak_http_is_a_problem() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"SSH-2.0-server\r\n")

        greeting = threading.Thread(target=greet)
        greeting.start()
        found = port("127.0.0.1", listener.getsockname()[1])
        greeting.join(10)
    assert (found.status, found.value) == ("problem", "Address already in use")


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    version = metadata.version

    def without(name: str) -> str:
        if name in ("torch", "s3fs"):
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without)
    found = {each.name: each for each in installed()}
    assert (found["torch"].status, found["torch"].remedy) == ("problem", "pip install 'trainhouse[server]'")
    assert found["s3fs"].status == "note" and "the extra s3" in found["s3fs"].remedy


def test_an_unwritable_state_directory_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert any(each.status == "problem" and "choose a writable" in each.remedy for each in disks(Path("/proc/none")))


def test_a_torch_that_does_not_load_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so is missing')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (found,) = (each for each in devices() if each.name == "torch")
    assert found.status == "problem" and found.value.endswith("libcudart.so is missing")


@pytest.mark.slow
def test_the_self_test_trains_and_samples_next_to_the_peak(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, free_port: str
) -> None:
    found = diagnosed(capsys, f"--state-dir={tmp_path}", f"--port={free_port}")
    for name in ("training", "sampling"):
        value = found[f"self-test {name}"]["value"]
        assert "tokens/s" in value and "% of " in value and "TFLOP/s" in value


def test_a_self_test_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainhouse.server.cli.checkup.self_test import self_test

    monkeypatch.setenv("TRAINHOUSE_DTYPE", "wrong")
    (found,) = self_test(CPU)
    assert found.status == "problem" and "dtype is 'wrong'" in found.value


@pytest.mark.slow
def test_bench_measures_a_running_server(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_model(tmp_path / "model", CPU)
    with live_server({"m/x": tmp_path / "model"}, tmp_path / "state") as server:
        flags = [f"--base-url={server.url}", "--api-key=tml-bench", "--steps=1", "--length=16"]
        assert main(["bench", "m/x", *flags, "--json"]) == 0
        speeds = json.loads(capsys.readouterr().out)
        assert 0 < speeds["training_share"] < 1 and 0 < speeds["sampling_share"] < 1
        assert speeds["training_tokens_per_second"] == pytest.approx(4 * 16 / speeds["step_seconds"])
        assert main(["bench", "none", *flags]) in (1, 5)
        assert main(["keys", "create", "alice", f"--state-dir={server.state_dir}"]) == 0
        capsys.readouterr()
        assert main(["tenants", "list", f"--state-dir={server.state_dir}", "--json"]) == 0
    tenants = {each["name"]: each for each in json.loads(capsys.readouterr().out)["tenants"]}
    assert tenants["alice"]["keys"] == 1 and tenants["alice"]["runs"] == 0
    assert any(each["runs"] == 1 for each in tenants.values())
