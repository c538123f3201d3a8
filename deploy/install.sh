#!/usr/bin/env bash
# Installs this checkout, with the releases that CI ran, in an environment: deploy/install.sh DIRECTORY [EXTRAS], such as
# `deploy/install.sh env server,demo`. PYTHON makes the environment. TORCH_CONSTRAINTS=/dev/null takes torch for CUDA,
# LOCK=/dev/null the newest releases.
set -euo pipefail

DEPLOY=$(cd "$(dirname "$0")" && pwd)
DIRECTORY=${1:?usage: deploy/install.sh DIRECTORY [EXTRAS], such as deploy/install.sh env server,demo}
EXTRAS=${2:+[$2]}
BIN=$DIRECTORY/bin

test -x "$BIN/python" || "${PYTHON:-python3}" -m venv "$DIRECTORY" || python3 -m venv "$DIRECTORY"
INDEX=$(PYTHON=$BIN/python "$DEPLOY/torch-index.sh")
CHECKOUT=(
  --quiet
  --constraint "${TORCH_CONSTRAINTS:-$DEPLOY/constraints.txt}"
  --constraint "${LOCK:-$DEPLOY/requirements.lock}"
  --editable "$(dirname "$DEPLOY")$EXTRAS"
)

# Python compiles a module when it is first imported: most never are.
with_pip() {
  "$BIN/python" -m pip install --disable-pip-version-check --no-compile ${INDEX:+"$INDEX"} "$@"
}

# Several times as fast, but it reads nothing of pip's configuration.
with_uv() {
  [ -n "$INDEX" ] && [ -z "$("$BIN/python" -m pip config list)" ] && with_pip --quiet uv &&
    "$BIN/uv" pip install --python "$BIN/python" --index-strategy unsafe-best-match "$INDEX" "$@"
}

with_uv "${CHECKOUT[@]}" || with_pip "${CHECKOUT[@]}"

PACKAGES=("$BIN"/../lib/python*/site-packages/*.dist-info)
echo "$DIRECTORY: trainhouse$EXTRAS, ${#PACKAGES[@]} packages, $(du -sm "$DIRECTORY" | cut -f1) MB, in $SECONDS s"
