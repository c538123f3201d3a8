"""After a worker was killed amid long samples: when a sample of three tokens is answered, and when the long ones are.

python -m trainhouse.tests.benchmarks.after_death [--requests 8] [--samples 48] [--most-megabytes 0]

The worker is killed once, as by `kill -9`; or, with --most-megabytes, each time that it has taken so much more than
before the requests, as the kernel does where there is no more.
"""

import argparse
import json
import os
import signal
import statistics
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
from trainhouse import SamplingClient, SamplingParams, ServiceClient

from ..acceptance.crashing import Crashing, until, worker_pids
from ..acceptance.training_script import MODEL
from ..tiny import tiny_model

PROMPT, LONG_TOKENS, SHORT_TOKENS, NUM_SHORT = [5] * 16, 1000, 3, 20
GIVE_UP_SECONDS = 180.0


class Killer(threading.Thread):
    """Kills the worker whenever it has more than `most_bytes`, until it is told to stop."""

    def __init__(self, server_pid: int, most_bytes: int) -> None:
        super().__init__(daemon=True)
        self.num_kills = 0
        self.stops = threading.Event()
        self._server_pid, self._most_bytes = server_pid, most_bytes

    def run(self) -> None:
        while not self.stops.wait(0.01):
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                for pid in worker_pids(self._server_pid):
                    if psutil.Process(pid).memory_info().rss > self._most_bytes:
                        os.kill(pid, signal.SIGKILL)
                        self.num_kills += 1


def measured(crashing: Crashing, requests: int, samples: int, most_megabytes: int) -> dict[str, object]:
    with ServiceClient(crashing.url, "tml-long") as long, ServiceClient(crashing.url, "tml-short") as short:
        shorts, longs = (client.create_sampling_client(base_model=MODEL) for client in (short, long))
        answer(shorts)
        [pid] = worker_pids(crashing.pid)
        killer = Killer(crashing.pid, psutil.Process(pid).memory_info().rss + (most_megabytes << 20))
        params = [SamplingParams(max_tokens=LONG_TOKENS, seed=seed) for seed in range(requests)]
        futures = [longs.sample(PROMPT, samples, each) for each in params]
        started = time.monotonic()
        if most_megabytes:
            killer.start()
            until(lambda: killer.num_kills, GIVE_UP_SECONDS)
        else:
            time.sleep(3)
            os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        seconds = [answer(shorts) for _ in range(NUM_SHORT)]
        all_short = time.monotonic() - killed
        answers = []
        for each in futures:
            try:
                each.result(GIVE_UP_SECONDS)
            except Exception as error:
                answers.append(f"{type(error).__name__}: {error}"[:160])
        ended = time.monotonic()
        killer.stops.set()
    return {
        "killed after, s": round(killed - started, 1),
        "first short sample after the death, s": round(seconds[0], 2),
        "the next ones, median and worst, s": [round(statistics.median(seconds[1:]), 3), round(max(seconds[1:]), 3)],
        "all short samples, s": round(all_short, 1),
        "the last long sample after the death, s": round(ended - killed, 1),
        "kills": killer.num_kills if most_megabytes else 1,
        "long samples that failed": answers,
    }


def answer(client: SamplingClient) -> float:
    """Seconds that a short one takes."""
    started = time.monotonic()
    client.sample(PROMPT, 1, SamplingParams(max_tokens=SHORT_TOKENS)).result(GIVE_UP_SECONDS)
    return time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--most-megabytes", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = tiny_model("qwen3", Path(scratch))
        with Crashing(model, Path(scratch) / "server").running() as crashing:
            print(json.dumps(measured(crashing, args.requests, args.samples, args.most_megabytes), indent=1))
            print(*(line for line in crashing.log.splitlines() if "the worker died" in line), sep="\n")


if __name__ == "__main__":
    main()
