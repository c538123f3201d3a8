"""The vLLM servers that the engine can use: one at a URL that others run, or our own."""

import asyncio
import contextlib
import json
import logging
import os
import re
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import httpx

from ....schemas.adapters.vllm_form import VllmForm, room_for
from ....schemas.errors import OperationError
from ...protocol.timeouts import GRACE_SECONDS, VLLM_SILENCE_SECONDS, VLLM_START_SECONDS
from ...protocol.worker_config import DEFAULT_KV_CACHE_BYTES, VllmConfig, WorkerConfig
from ...resources.machine import runs_on_cpu
from ...scheduler.supervision.backoff import RestartBackoff
from ...shapes.model_shape import ModelShape, read_architecture, read_model
from ...shapes.parts import GatedDelta

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
# vLLM keeps further adapters in its cache in host memory.
_MAX_ADAPTERS_ON_DEVICE = 8
# Of these models vLLM 0.32 reads from the generation config, not from config.json, whether queries grow with their
# positions; where that does not say so either, they grow if the longest context exceeds 32768 tokens.
_TUNED_BY_GENERATION_CONFIG = "llama4_text"
# The end of the names of classes that have parts for images.
_WITH_IMAGES = "ForConditionalGeneration"
# How much of the end of the log is searched for the last error.
_TAIL_BYTES = 64 << 10


class VllmServer:
    """A server that others run at a URL, and that may be down at times.

    name: for messages.
    num_starts: increases with each start of our own server, which loses everything loaded before.
    retry_seconds: how long requests wait while the server is down; None means until it is back.
    takes_full_models: whether the base model's weights can be replaced: others may use a server at a URL.
    source: the directory or hub id of the base model, "" if unknown.
    speculative: vLLM's configuration of the draft with which our own server starts; None = without.
    """

    num_starts = 0
    retry_seconds: float | None = VLLM_SILENCE_SECONDS
    is_on_cpu = False
    takes_full_models = False
    source = ""
    speculative: Mapping[str, object] | None = None

    def __init__(self, url: str, api_key: str | None) -> None:
        self.name = f"the vLLM at {url}"
        self.url = url.rstrip("/")
        self.api_key = api_key

    @property
    def is_ready(self) -> bool:
        return True

    @property
    def pids(self) -> list[int]:
        return []

    async def start(self, on_progress: Callable[[str], None]) -> None:
        """Raises ValueError with the reason if the server does not start."""
        on_progress(f"sampling with {self.name}")

    async def close(self) -> None:
        pass

    async def ready(self) -> None:
        """Waits while the server restarts. Raises OperationError if it will not."""

    def kill(self) -> None:
        """Ends our own server, which then starts again."""

    def silence_error(self, reason: str) -> OperationError:
        """Returns the error of requests that have waited for `retry_seconds`."""
        assert self.retry_seconds is not None
        return OperationError(
            f"{self.name} has not responded for {self.retry_seconds:.0f} seconds ({reason}): start it, or start this"
            " server with --sampler native",
            "server",
        )


class VllmProcess(VllmServer):
    """`vllm serve` of one base model on a free loopback port, restarted when it ends.

    It ends with this process, however that ends. Requests wait through a restart without a time limit.
    """

    retry_seconds = None
    takes_full_models = True

    def __init__(self, model: WorkerConfig, config: VllmConfig, form: VllmForm, directory: Path | None) -> None:
        """Starts nothing yet. `directory` is for the log; None means the system's directory for temporary files."""
        super().__init__("", secrets.token_hex(16))
        self.name = f"vLLM of {model.model.name}"
        self.is_on_cpu = runs_on_cpu(model)
        self.source = model.model.source
        self._model = model
        self._config = config
        self._form = form
        self._log = VllmLog((directory or Path(tempfile.gettempdir()) / f"trainhouse-{os.getpid()}") / "vllm.log")
        self._watchdog: asyncio.subprocess.Process | None = None
        self._pid: int | None = None
        self._ready = asyncio.Event()
        self._crash: BaseException | None = None
        self.backoff = RestartBackoff()
        self._restart_task: asyncio.Task[None] | None = None

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    @property
    def pids(self) -> list[int]:
        return [] if self._pid is None else [self._pid]

    async def start(self, on_progress: Callable[[str], None]) -> None:
        on_progress(f"starting {self.name}, which logs to {self._log.file} ...")
        started, shape = time.monotonic(), _shape(self._model)
        if self.is_on_cpu and shape is not None and (refused := _refusal_on_cpu(shape, self._dtype)) is not None:
            raise ValueError(f"{self.name} does not start: on CPUs vLLM {refused}, or use --sampler native")
        try:
            self._log.begin()
            await self._start()
        except OSError as error:
            raise ValueError(f"{self.name} does not start: {error}") from error
        on_progress(f"{self.name} ready in {time.monotonic() - started:.1f} s at {self.url}")
        self._restart_task = asyncio.create_task(self._keep_running())
        self._restart_task.add_done_callback(self._watch_ended)

    async def close(self) -> None:
        if self._restart_task is not None:
            self._restart_task.cancel()
            await asyncio.wait({self._restart_task})
        await self._stop()

    async def ready(self) -> None:
        await self._ready.wait()
        if self._crash is not None:
            raise OperationError(f"{self.name} is out of service after an internal error: {self._crash}", "server")

    def kill(self) -> None:
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)

    async def _keep_running(self) -> None:
        while True:
            assert self._watchdog is not None
            status = await self._watchdog.wait()
            self._ready.clear()
            logger.error("%s ended with status %d: %s", self.name, status, self._log.last_error())
            while not await self._try_to_start():
                pass

    def _watch_ended(self, watch: "asyncio.Task[None]") -> None:
        """Handles a bug of ours: only that ends the watch before `close`. Requests must not wait forever then."""
        if not watch.cancelled():
            self._crash = watch.exception()
            logger.critical("the task that restarts %s crashed", self.name, exc_info=self._crash)
            self._ready.set()

    async def _try_to_start(self) -> bool:
        await asyncio.sleep(self.backoff.next_delay())
        try:
            await self._start()
        except (ValueError, OSError) as error:
            logger.error("%s does not restart: %s", self.name, error)
            # Count no uptime, however long the attempt took: the server has not served.
            self.backoff.started()
            return False
        logger.warning("%s has restarted at %s", self.name, self.url)
        return True

    async def _start(self) -> None:
        """Raises OSError, and ValueError with the reason."""
        await self._stop()
        self.num_starts += 1
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        await self._spawn(self._command(port))
        try:
            await asyncio.wait_for(self._until_healthy(), VLLM_START_SECONDS)
        except TimeoutError:
            reason = f"{self.name} does not answer after {VLLM_START_SECONDS:.0f} s: see {self._log.file}"
            raise ValueError(reason) from None
        self.backoff.started()
        self._ready.set()

    async def _until_healthy(self) -> None:
        assert self._watchdog is not None
        async with httpx.AsyncClient(base_url=self.url, trust_env=False) as client:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get("/health")).is_success:
                        return
                if self._watchdog.returncode is not None:
                    raise ValueError(f"{self.name} does not start: {self._log.last_error()}")
                await asyncio.sleep(_POLL_SECONDS)

    async def _spawn(self, command: Sequence[str]) -> None:
        """Starts the watchdog, which starts the command. Raises OSError and ValueError."""
        program = Path(__file__).with_name("watchdog.py")
        with self._log.open() as output:
            self._watchdog = await asyncio.create_subprocess_exec(
                *(sys.executable, "-IS", str(program), str(GRACE_SECONDS), *command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                env=self._environment(),
            )
        assert self._watchdog.stdout is not None
        line = await self._watchdog.stdout.readline()
        if not line:
            raise ValueError(f"{command[0]} does not run: {self._log.last_error()}")
        self._pid = int(line)

    async def _stop(self) -> None:
        watchdog, self._watchdog, self._pid = self._watchdog, None, None
        if watchdog is not None:
            assert watchdog.stdin is not None
            watchdog.stdin.close()
            await watchdog.wait()

    def _command(self, port: int) -> list[str]:
        model, config = self._model, self._config
        assert config.python is not None, "checked at start"
        num_on_device = min(model.adapter_slots, _MAX_ADAPTERS_ON_DEVICE)
        flags: dict[str, object] = {
            "served-model-name": model.model.name,
            "host": "127.0.0.1",
            "port": port,
            "dtype": self._dtype,
            "tensor-parallel-size": config.tensor_parallel,
            "gpu-memory-utilization": config.memory_share,
            "max-lora-rank": room_for(self._max_rank),
            "max-loras": num_on_device,
            "max-cpu-loras": max(num_on_device, model.adapter_slots),
            # Defaults for missing parameters must not be read from the model's directory.
            "generation-config": "vllm",
            "max-logprobs": -1,
            "middleware": "__main__.WeightsEndpoint",
            "worker-cls": "__main__.Worker",
        }
        if self.speculative is not None:
            flags["speculative-config"] = json.dumps(self.speculative)
            flags["per-request-spec-decode-metrics"] = "summary"
        if model.max_context_length is not None:
            flags["max-model-len"] = model.max_context_length
        shape = _shape(model)
        if shape is not None and shape.model_type == _TUNED_BY_GENERATION_CONFIG:
            tuned = any(each.growth is not None for each in shape.attentions)
            flags["override-generation-config"] = json.dumps({"attn_temperature_tuning": tuned})
        switches = ["--enable-lora", "--disable-uvicorn-access-log", "--enable-prompt-tokens-details"]
        if self._form.experts == "mixed":
            switches.append("--enable-mixed-moe-lora-format")
        if (read_architecture(model.model) or "").endswith(_WITH_IMAGES):
            switches.append("--language-model-only")
        if _lacks_tokenizer(model.model.source):
            switches.append("--skip-tokenizer-init")
        named = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
        program = str(Path(__file__).with_name("serve.py"))
        return [config.python, program, "serve", self.source, *named, *switches]

    @property
    def _dtype(self) -> str:
        for dtype in (self._config.dtype, self._model.dtype):
            if dtype != "auto":
                return dtype
        return "float32" if self.is_on_cpu else "bfloat16"

    @property
    def _max_rank(self) -> int:
        """The largest rank of a pair of matrices: one pair may adapt several parts of a linear layer."""
        shape = _shape(self._model)
        if shape is None:
            return self._model.max_lora_rank
        of_experts = 2 if shape.experts is not None and self._form.experts in ("joined", "mixed") else 1
        num_pairs = (len(weight.adapters) for layer in shape.layers for weight in layer.weights())
        return self._model.max_lora_rank * max(of_experts, *num_pairs)

    def _environment(self) -> Mapping[str, str]:
        environment = {
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_API_KEY": self.api_key,
            "VLLM_NO_USAGE_STATS": "1",
            # Else a directory in our working directory could be imported in place of a package of vLLM's.
            "PYTHONSAFEPATH": "1",
        }
        if runs_on_cpu(self._model):
            environment |= {
                "VLLM_TARGET_DEVICE": "cpu",
                "VLLM_CPU_KVCACHE_SPACE": str(max(1, (self._model.kv_cache_bytes or DEFAULT_KV_CACHE_BYTES) >> 30)),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": str(self._model.threads),
                # Its threads share the cores with training: waiting ones must sleep (see pools/worker_host.py).
                "OMP_WAIT_POLICY": "PASSIVE",
                "KMP_BLOCKTIME": "0",
            }
        elif devices := re.findall(r"cuda:([0-9]+)", self._model.device):
            environment["CUDA_VISIBLE_DEVICES"] = _visible_devices([int(device) for device in devices])
        return os.environ | environment


class VllmLog:
    """All servers that this process starts append to one file. An earlier process's file is renamed to `.1`."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._start = 0

    def begin(self) -> None:
        """Renames the file of an earlier process. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            self.file.replace(f"{self.file}.1")

    def open(self) -> BinaryIO:
        """Opens the file for the next server's output. Raises OSError."""
        self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        output = self.file.open("ab")
        self._start = output.tell()
        return output

    def last_error(self) -> str:
        """Returns the newest server's last line that names an error, else its last line."""
        lines = [line.strip() for line in self._tail().splitlines() if line.strip()]
        named = [line for line in lines if re.search(r"\b[A-Za-z]*(Error|Exception)\b: ", line)]
        last = (named or lines or ["it logged nothing"])[-1]
        without_origin = re.sub(r"^\(.*?\)( [A-Z]+ [^]]*\])?", "", last).strip()
        return f"{without_origin} (more in {self.file})"

    def _tail(self) -> str:
        try:
            with self.file.open("rb") as log:
                log.seek(max(self._start, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                return log.read().decode(errors="replace")
        except OSError as error:
            return f"its log cannot be read: {error}"


def _visible_devices(numbers: Sequence[int]) -> str:
    """Returns CUDA_VISIBLE_DEVICES for vLLM. Numbers count the devices that this process sees: cuda:0 is its first.

    Raises ValueError if a number is beyond them.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return ",".join(str(number) for number in numbers)
    ours = [device.strip() for device in visible.split(",")]
    for number in numbers:
        if number >= len(ours):
            raise ValueError(
                f"vLLM cannot use cuda:{number}, CUDA_VISIBLE_DEVICES={visible} has {len(ours)} devices: name one"
            )
    return ",".join(ours[number] for number in numbers)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _shape(model: WorkerConfig) -> ModelShape | None:
    """Returns the model's shape, None if it is of no known family or its files are not here."""
    try:
        shape = read_model(model.model)
    except ValueError:
        return None
    return shape if isinstance(shape, ModelShape) else None


def _refusal_on_cpu(shape: ModelShape, dtype: str) -> str | None:
    if shape.experts is not None:
        return "has no kernels for experts with adapters: give it a GPU (--sampler-device)"
    if dtype != "bfloat16" and any(isinstance(mixer, GatedDelta) for mixer in shape.mixers):
        return "runs the gated delta rule in bfloat16 alone: add --vllm-dtype bfloat16"
    return None


def _lacks_tokenizer(source: str) -> bool:
    """True if `source` is a directory without tokenizer. False for a hub id: vLLM checks that itself."""
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json")
    return Path(source).is_dir() and not any((Path(source) / name).exists() for name in names)
