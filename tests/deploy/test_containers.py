"""The image, its build context and the compose files, as far as they can be checked without a container engine."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from ..unit import ROOT
from .tools import DEPLOY, passes, tool

COMPOSE = sorted(DEPLOY.glob("compose*.yaml"))


@pytest.mark.slow
def test_hadolint_accepts_the_image(tmp_path: Path) -> None:
    assert passes(tool("hadolint"), DEPLOY / "Dockerfile")
    latest = tmp_path / "Dockerfile"
    latest.write_text("FROM python:latest\nRUN cd /opt && pip install torch\n")
    assert not passes(tool("hadolint"), latest)


def test_every_variant_runs_without_root_and_checks_its_health() -> None:
    stages = re.split(r"^(?=FROM )", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    named = {stage.split("\n")[0].split()[-1]: stage for stage in stages}
    assert "USER 1000:1000" in named["runtime"] and "HEALTHCHECK" in named["runtime"]
    for variant in ("cpu", "cuda"):
        assert named[variant].startswith("FROM runtime") and "USER" not in named[variant]
        assert f"COPY --from=build-{variant}" in named[variant]
    assert list(named)[-1] == "cpu", "the default"


def test_the_build_context_has_what_the_wheel_needs_and_nothing_else() -> None:
    first, *patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] not in ("", "#")]
    assert first == "*"
    sent = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    tracked = subprocess.check_output(["git", "ls-files", "--", *sent], cwd=ROOT, text=True).split()
    assert all(any(path == one or path.startswith(f"{one}/") for path in tracked) for one in sent), "all exist"
    packages = {"client", "examples", "schemas", "server", "workers"}
    assert packages <= set(sent) and not {"tests", "docs", ".git", "deploy"} & set(sent)
    copied = re.findall(r"deploy/[\w.]+", (DEPLOY / "Dockerfile").read_text().replace("deploy/Dockerfile", ""))
    assert copied and set(copied) <= set(sent)


@pytest.mark.slow
def test_compose_files_follow_the_specification(tmp_path: Path) -> None:
    check = (tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec")
    assert passes(*check, *COMPOSE)
    wrong = tmp_path / "compose.yaml"
    wrong.write_text((DEPLOY / "compose.yaml").read_text().replace("stop_grace_period", "stop_grace"))
    assert not passes(*check, wrong)


def test_compose_mounts_files_of_this_folder_and_publishes_on_loopback_only() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert set(services) == {"trainhouse", "postgres", "prometheus", "grafana"}
    for name, service in services.items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        mounts = [volume.split(":")[0] for volume in service["volumes"]]
        assert all((DEPLOY / mount).exists() for mount in mounts if mount.startswith("./")), name
        assert not service["image"].endswith(":latest") and ":" in service["image"], name
    assert any(volume.endswith(":/var/cache/trainhouse") for volume in services["trainhouse"]["volumes"])
