"""A server process for tests on a free loopback port; it is stopped by its own process id, and its log is kept."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

READY_SECONDS = 240
STOP_SECONDS = 60
# Server options: pool and layout of the ranks of a base model.
DEPLOYMENTS: dict[str, dict[str, Any]] = {
    "local": {},
    "ray": {"pool": "ray"},
    "fsdp=2": {"parallel": "fsdp=2"},
    "tp=2": {"parallel": "tp=2"},
}
# For fixtures that start a server: a short test run uses only the first of them.
EACH_DEPLOYMENT = [
    pytest.param(deployment, marks=[pytest.mark.full] if deployment != "local" else []) for deployment in DEPLOYMENTS
]
EACH_LAYOUT = [each for each in EACH_DEPLOYMENT if each.values != ("ray",)]
RUNNING: list["LiveServer"] = []  # conftest adds their logs to failed tests


CHATML = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
"""A chat template whose turns end with a token, as those of real models do."""


@dataclass(eq=False)
class LiveServer:
    url: str
    process: subprocess.Popen[bytes]
    log: Path
    state_dir: Path

    def log_tail(self, num_lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])


@contextmanager
def live_server(
    models: Mapping[str, Path | str],
    state_dir: Path,
    pool: str = "local",
    module: str = "trainhouse.server",
    **options: object,
) -> Iterator[LiveServer]:
    """Starts a server and stops it at the end; the same `state_dir` makes it a restart.

    `options` become flags: sdk_max_chunk_datums=3 -> --sdk-max-chunk-datums 3; a list repeats the flag. module: run
    with `python -m`.
    """
    # Private from the start; otherwise the server restricts it, and warns.
    state_dir.mkdir(0o700, parents=True, exist_ok=True)
    log, ready = state_dir / "server.log", state_dir / "ready"
    ready.unlink(missing_ok=True)
    process = start([sys.executable, "-m", module, *arguments(models, state_dir, pool, ready, options)], log)
    try:
        server = LiveServer(wait_until_ready(process, ready, log), process, log, state_dir)
        RUNNING.append(server)
        yield server
    finally:
        RUNNING[:] = [server for server in RUNNING if server.process is not process]
        stop(process)


def arguments(
    models: Mapping[str, Path | str], state_dir: Path, pool: str, ready: Path, options: Mapping[str, object]
) -> list[str]:
    flags = [f"--base-model={name}={directory}" for name, directory in models.items()]
    # Tiny models gain nothing from more threads.
    flags += flags_of({"threads": 1, "drain_seconds": 5} | dict(options))
    fixed = ["--host=127.0.0.1", "--port=0", f"--pool={pool}", f"--state-dir={state_dir}", f"--ready-file={ready}"]
    return ["serve", *fixed, *flags]


def flags_of(options: Mapping[str, object]) -> list[str]:
    return [
        f"--{name.replace('_', '-')}={each}"
        for name, value in options.items()
        for each in (value if isinstance(value, list) else [value])
    ]


def start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    environment = {"HF_HUB_OFFLINE": "1"} | os.environ | {"PYTHONUNBUFFERED": "1"}
    with log.open("ab") as output:
        # In a new session, so that a server that does not stop can be killed together with its workers.
        return subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )


def wait_until_ready(process: subprocess.Popen[bytes], ready: Path, log: Path) -> str:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if ready.is_file() and (url := re.search(r"https?://[^\s\"]+", ready.read_text())):
            return url[0].rstrip("/")
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise RuntimeError(
        f"the server is not ready (exit status {process.poll()}):\n{log.read_text(errors='replace')[-8000:]}"
    )


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_SECONDS)
        raise


def save_byte_tokenizer(directory: Path, more_specials: Sequence[str] = ()) -> None:
    """Adds a tokenizer to a tiny model: 0 <pad>, 1 <s>, 2 </s>, then the 256 bytes; with a chat template.

    `more_specials` follow the bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=list(more_specials),
        chat_template="{% for message in messages %}<s>{{ message['content'] }}\n{% endfor %}",
    ).save_pretrained(directory)
