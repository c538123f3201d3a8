"""A user of a server, who runs programs of tinker-cookbook and reads what they log."""

import json
import math
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .page import options_of

PROGRAMS = Path(__file__).with_name("programs")
RECIPE_SECONDS = 600


@dataclass(frozen=True)
class Run:
    """The metrics and checkpoints that a recipe writes to its logs."""

    metrics: list[dict[str, Any]]
    checkpoints: list[dict[str, Any]]

    def finite(self, name: str) -> list[float]:
        values = [step[name] for step in self.metrics if name in step]
        assert values and all(math.isfinite(value) for value in values), (name, self.metrics)
        return values


@dataclass(frozen=True)
class Cookbook:
    """Runs programs of tinker-cookbook as a user of the server at `url`, in a folder with data sets and tokenizers."""

    python: str
    folder: Path
    url: str

    def recipe(self, module: str, log: str, **options: object) -> Run:
        """Runs tinker_cookbook.recipes.`module` with the options of docs/guides/cookbook.md and these.

        Its logs go to `log`, where it resumes from a checkpoint.
        """
        module = f"tinker_cookbook.recipes.{module}"
        given = options_of(module) | {"log_path": self.folder / log} | options
        self.run("-m", module, *(f"{name}={value}" for name, value in given.items()))
        return self.logged(log)

    def program(self, name: str, *arguments: str) -> str:
        """Runs a program of ours that uses the cookbook; returns what it prints."""
        return self.run(str(PROGRAMS / f"{name}.py"), *arguments)

    def logged(self, log: str) -> Run:
        return Run(json_lines(self.folder / log / "metrics.jsonl"), json_lines(self.folder / log / "checkpoints.jsonl"))

    def run(self, *arguments: str) -> str:
        environment = os.environ | {"TINKER_BASE_URL": self.url, "TINKER_API_KEY": "tml-cookbook"}
        environment |= {"TINKER_TELEMETRY": "0", "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
        environment |= {"HF_HOME": str(self.folder / "hf"), "HF_HUB_OFFLINE": "1"}
        environment |= {"TINKER_COOKBOOK_RUNS_DIR": str(self.folder / "runs"), "PYTHONPATH": str(PROGRAMS)}
        done = subprocess.run(
            [self.python, *arguments],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RECIPE_SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return done.stdout


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
