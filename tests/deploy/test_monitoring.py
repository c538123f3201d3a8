"""Dashboards and alerts: what they name is exported, and a real Prometheus evaluates them on a live server."""

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from trainhouse import AdamParams, Datum, SamplingParams, ServiceClient

from ..live import live_server
from .tools import DEPLOY, passes, tool

pytestmark = pytest.mark.slow

MONITORING = DEPLOY / "monitoring"
DASHBOARDS = sorted((MONITORING / "grafana" / "dashboards").glob("*.json"))
KEY = "tml-me"
SUFFIXES: Mapping[str, Sequence[str]] = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}
WITHOUT_DRAFTS = {"trainhouse_draft_tokens_total"}
"""Metrics that have no series on a server that samples without drafts."""


def expressions() -> Iterator[tuple[str, str]]:
    """Yields the titles and expressions of all panels, variables and alerts."""
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            yield from ((f"{path.stem}: {panel['title']}", each["expr"]) for each in panel.get("targets", []))
    for rule in yaml.safe_load((MONITORING / "rules.yaml").read_text())["groups"][0]["rules"]:
        yield rule["alert"], rule["expr"]


def metrics_of(expression: str) -> set[str]:
    return set(re.findall(r"\btrainhouse_\w+", expression))


def exported(scrape: str) -> set[str]:
    return {
        f"{family.name}{suffix}"
        for family in text_string_to_metric_families(scrape)
        for suffix in SUFFIXES.get(family.type, ("",))
    }


def unknown(expression: str, names: set[str]) -> set[str]:
    return metrics_of(expression) - names


@contextmanager
def trained_server(model: Path, state_dir: Path) -> Iterator[str]:
    """Yields the URL of a server that has trained, sampled and refused."""
    with live_server({"tiny/llama": model}, state_dir) as server, ServiceClient(server.url, KEY) as service:
        client = service.create_lora_training_client("tiny/llama", rank=4)
        work(client)
        assert httpx.get(f"{server.url}/api/v1/training_runs", headers={"X-API-Key": "none"}).status_code == 401
        yield server.url


def work(client: Any) -> None:
    datum = Datum([1, 2, 3, 4], {"target_tokens": [2, 3, 4, 5], "weights": [1.0] * 4})
    client.forward_backward([datum], "cross_entropy").result()
    client.optim_step(AdamParams(learning_rate=1e-3)).result()
    client.save_weights_and_get_sampling_client().sample([1, 2, 3], 1, SamplingParams(max_tokens=4)).result()


def test_dashboards_and_alerts_name_only_what_a_server_exports(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    with trained_server(tiny_models["llama"], tmp_path / "state") as url:
        scrape = httpx.get(f"{url}/metrics", headers={"X-API-Key": KEY}).text
    names = exported(scrape)
    assert not [(title, missing) for title, each in expressions() if (missing := unknown(each, names))]
    assert unknown("rate(trainhouse_trained_token_total[1m])", names), "a misspelt name is found"


def test_promtool_accepts_the_alerts_and_they_are_sent_when_they_should(tmp_path: Path) -> None:
    promtool = tool("promtool")
    rules = shutil.copy(MONITORING / "rules.yaml", tmp_path)
    assert passes(promtool, "check", "rules", rules)
    assert passes(promtool, "check", "config", "--syntax-only", MONITORING / "prometheus.yaml")
    tests = shutil.copy(Path(__file__).with_name("rules_test.yaml"), tmp_path)
    assert passes(promtool, "test", "rules", tests, cwd=tmp_path)
    Path(rules).write_text((MONITORING / "rules.yaml").read_text().replace("> 0.01", "> 0.5"))
    assert not passes(promtool, "test", "rules", tests, cwd=tmp_path)


@dataclass(frozen=True)
class Prometheus:
    url: str

    def ask(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters).json()
        assert answer["status"] == "success", (parameters, answer)
        return answer["data"]

    def query(self, expression: str) -> list[Any]:
        return self.ask("query", query=expression)["result"]

    def wait_for(self, expression: str, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not self.query(expression):
            assert time.monotonic() < deadline, expression
            time.sleep(0.2)


@contextmanager
def prometheus(server_url: str, directory: Path) -> Iterator[Prometheus]:
    """Yields a Prometheus with the configuration of deploy/monitoring, which scrapes this server twice a second."""
    program = tool("prometheus")
    config = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    (scraped,) = config["scrape_configs"]
    (directory / "key").write_text(KEY)
    scraped["authorization"]["credentials_file"] = "key"
    scraped["static_configs"][0]["targets"] = [server_url.removeprefix("http://")]
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
    shutil.copy(MONITORING / "rules.yaml", directory)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{one.getsockname()[1]}"
    command = [program, "--config.file=prometheus.yaml", "--storage.tsdb.path=data", f"--web.listen-address={address}"]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=directory, stdout=log, stderr=log)
    try:
        wait_until_ready(f"http://{address}", process, directory / "log")
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait(30)


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/-/ready").is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise RuntimeError(log.read_text())


def as_grafana_asks(expression: str) -> str:
    """Returns an expression with the values that Grafana puts in place of its variables."""
    return re.sub(r"\$(instance|group)", ".+", expression.replace("$__rate_interval", "1m"))


def test_prometheus_evaluates_every_panel_and_alert_on_a_live_server(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    with (
        trained_server(tiny_models["llama"], tmp_path / "state") as url,
        prometheus(url, tmp_path) as seen,
        ServiceClient(url, KEY) as service,
    ):
        client = service.create_lora_training_client("tiny/llama", rank=4)
        seen.wait_for("trainhouse_live_runs == 2")
        work(client)
        seen.wait_for("increase(trainhouse_sample_seconds_count[1m]) > 0")
        empty = [
            title
            for title, each in expressions()
            if ": " in title and not seen.query(as_grafana_asks(each)) and not metrics_of(each) & WITHOUT_DRAFTS
        ]
        assert empty == [], "panels without data"
        assert not seen.query(as_grafana_asks("rate(trainhouse_trained_token_total[$__rate_interval])"))
        rules = seen.ask("rules")["groups"][0]["rules"]
        assert {rule["health"] for rule in rules} == {"ok"}
        assert {rule["state"] for rule in rules} == {"inactive"}


def test_dashboards_can_be_provisioned() -> None:
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        ids = [panel["id"] for panel in board["panels"]]
        variables = {variable["name"] for variable in board["templating"]["list"]}
        assert len(set(ids)) == len(ids) and board["uid"].startswith("trainhouse-")
        used = set(re.findall(r"\$\{?(\w+)\}?", path.read_text())) - {"__rate_interval", "__all"}
        assert used <= variables, f"{path}: a panel names an unknown variable"
    source = yaml.safe_load((MONITORING / "grafana" / "datasource.yaml").read_text())["datasources"][0]
    assert source["type"] == "prometheus" and source["url"] == "http://prometheus:9090"
