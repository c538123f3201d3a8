"""Run in an environment that has the client alone."""

import subprocess
import sys
from importlib.metadata import version
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import trainhouse

assert Path(trainhouse.__file__).is_relative_to(sys.prefix), trainhouse.__file__
assert files("trainhouse").joinpath("py.typed").is_file()
assert not any(find_spec(name) for name in ("torch", "fastapi", "transformers", "sqlalchemy"))
command = Path(sys.executable).with_name("trainhouse")
said = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
assert version("trainhouse") in said, said
subprocess.run([command, "plan", "--help"], check=True, capture_output=True)
refused = subprocess.run([command, "serve", "--base-model", "x"], capture_output=True, text=True)
assert refused.returncode != 0 and "trainhouse[server]" in refused.stderr, refused.stderr
trainhouse.Datum([1, 2], {"target_tokens": [2, 3]})
print(f"client alone: trainhouse {version('trainhouse')}")
