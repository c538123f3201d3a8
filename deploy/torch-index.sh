#!/usr/bin/env bash
# Prints the option with which pip finds torch's builds for CPUs: PyPI's builds for Linux bring gigabytes of CUDA
# libraries. It prints none for other constraints than ours, which may name a CUDA build, and none where the index is not
# reached in three seconds: then pip's own configuration decides.
set -euo pipefail

INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
OURS=$(dirname "$0")/constraints.txt
[ "$(uname)" = Linux ] && [ "${TORCH_CONSTRAINTS:-$OURS}" -ef "$OURS" ] || exit 0
# The alarm also ends a search for the host's address, for which there is no timeout.
PROBE='import signal, sys, urllib.request; signal.alarm(3); urllib.request.urlopen(sys.argv[1])'
if "${PYTHON:-python3}" -c "$PROBE" "$INDEX/torch/" 2> /dev/null; then
  echo "--extra-index-url=$INDEX"
else
  echo "$INDEX is not reached: pip takes torch from where it is configured to, maybe the build for CUDA (5 GB); TORCH_INDEX=URL names a mirror" >&2
fi
