"""The core works without each of its plugins: its tests pass in a copy of the tree that lacks their folders."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .test_architecture import PLUGINS, ROOT

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

TRAINS_AND_SAMPLES = "tests/acceptance/test_official_sdk.py"
TESTS = {
    "planner": ("tests/workers/worker/test_worker.py", "tests/workers/scheduler", "tests/server/serving"),
    "cpu": ("tests/workers/worker/test_worker.py", "tests/workers/sampler/test_sampler.py"),
    "vllm": ("tests/workers/engines/test_sampler_groups.py", "tests/workers/scheduler", "tests/server/serving"),
    "console": ("tests/server/routes", "tests/server/tenants", "tests/server/serving"),
    "standby": ("tests/server/serving", "tests/server/files", "tests/server/store"),
    "openai": ("tests/server/http", "tests/server/routes", "tests/server/tenants", "tests/schemas"),
    "formats": ("tests/workers/worker/test_worker.py", "tests/workers/shapes", "tests/workers/scheduler"),
    "drafts": (
        *("tests/workers/worker/test_worker.py", "tests/workers/training", "tests/workers/sampler/test_sampler.py"),
        *("tests/server/routes", "tests/server/runs", "tests/server/tenants"),
    ),
}
"""The core's tests that are nearest to the plugin's rows, run with those of the SDK."""


def without(plugin: str, directory: Path) -> Path:
    """Returns a copy of the tree without the plugin's folders and the tests of these."""
    copy = directory / "trainhouse"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    for folder in PLUGINS[plugin]:
        shutil.rmtree(copy / folder)
        shutil.rmtree(copy / "tests" / folder, ignore_errors=True)
    return copy


def run_without(plugin: str, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments in a copy of the tree."""
    copy, environment = without(plugin, directory), {**os.environ, "PYTHONPATH": str(directory)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=800)


REFUSED = {
    "planner": (["--parallel=auto"], "--parallel auto needs the planner"),
    "vllm": (["--sampler=vllm", "--vllm-url=http://127.0.0.1:9"], "sampler vllm needs workers/engines/vllm"),
}


@pytest.mark.parametrize("plugin", REFUSED)
def test_what_only_a_plugin_does_is_refused_without_it(
    plugin: str, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    model, (flags, refusal) = f"--base-model=m={tiny_models['qwen3']}", REFUSED[plugin]
    place = f"--state-dir={tmp_path / 'state'}"
    done = run_without(plugin, tmp_path, "-m", "trainhouse.server", "serve", model, place, *flags)
    assert done.returncode and refusal in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_a_shared_database_is_refused_without_the_standby(
    tiny_models: dict[str, Path], tmp_path: Path, postgres_url: str
) -> None:
    serve = ("-m", "trainhouse.server", "serve", f"--base-model=m={tiny_models['qwen3']}", "--port=0")
    places = (f"--state-dir={tmp_path / 'state'}", f"--database-url={postgres_url}")
    done = run_without("standby", tmp_path, *serve, *places)
    assert done.returncode and "--database-url needs server/replication" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("plugin", "expected"),
    [
        ("console", {"/": "/docs", "/console": 404, "/v1/models": 200, "named": 0}),
        ("openai", {"/": "/console", "/console": 303, "/v1/models": 404, "named": 2}),
    ],
)
def test_a_server_lacks_the_pages_of_a_missing_plugin(plugin: str, expected: dict[str, object], tmp_path: Path) -> None:
    done = run_without(plugin, tmp_path, "-c", _ASK)
    assert done.returncode == 0 and json.loads(done.stdout) == expected, done.stdout + done.stderr


_ASK = """
import asyncio, json, tempfile
from pathlib import Path
from trainhouse.server.serving.server_process import greeting
from trainhouse.tests.server.api import running_api

async def ask(state_dir):
    async with running_api(state_dir) as api:
        client = await api.client()
        home = await client.get("/", headers={"Accept": "text/html"})
        found = {path: (await client.get(path)).status_code for path in ("/console", "/v1/models")}
        created = await client.post("/api/v1/create_session", json={"sdk_version": "0.38.0", "tags": []})
        named = [words for words in (created.text, greeting(api.services.config, "", False)) if "/console" in words]
    print(json.dumps({"/": home.headers["location"], **found, "named": len(named)}))

asyncio.run(ask(Path(tempfile.mkdtemp())))
"""


def test_a_packed_release_is_refused_without_the_formats(tmp_path: Path) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}
    code = f"from trainhouse.workers.shapes.model_shape import refusal_of; print(refusal_of({config}))"
    done = run_without("formats", tmp_path, "-c", code)
    assert "by fp8 are not supported, because this installation is without workers/formats" in done.stdout, done.stderr


def test_drafts_are_refused_without_them(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    done = run_without("drafts", tmp_path, "-c", _CREATE, str(tiny_models["qwen3"]))
    refusals = "draft models need server/drafts", "draft models need workers/drafts"
    assert done.returncode == 0 and all(refusal in done.stdout for refusal in refusals), done.stdout + done.stderr


_CREATE = """
import asyncio, sys, tempfile
from pathlib import Path
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.models import DraftConfig
from trainhouse.tests.server.noting import with_noting_worker
from trainhouse.tests.server.real import MODEL, running_server, server_config, started_dispatch
from trainhouse.workers.registry.programs import program_of

async def ask(config):
    async with started_dispatch(config, with_noting_worker) as dispatch, running_server(config, dispatch) as server:
        draft = {"base_model": MODEL, "model_seq_id": 0, "model_role": "draft", "draft": {"algorithm": "eagle3"}}
        print(await server.post("create_model", draft | {"session_id": await server.create_session()}, status=400))

if __name__ == "__main__":
    asyncio.run(ask(server_config(Path(sys.argv[1]), Path(tempfile.mkdtemp()))))
    try:
        program_of("draft", DraftConfig(algorithm="eagle3"))
    except OperationError as error:
        print(error.message)
"""


@pytest.mark.parametrize("plugin", PLUGINS)
def test_the_core_works_without(plugin: str, tmp_path: Path) -> None:
    tests = ("-m", "pytest", "-q", "-m", "not full and not slow", TRAINS_AND_SAMPLES, *TESTS[plugin])
    done = run_without(plugin, tmp_path, *tests)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
