"""Traces one forward_backward of one datum through a live server: the functions, files and frames that it runs through.

`make request-path` prints them. Comprehensions and lambdas are not counted.
"""

import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import trainhouse
from trainhouse import AdamParams, Datum

from .live import live_server
from .tiny import tiny_model

ROOT = Path(__file__).parent.parent
OUTPUT, SWITCH = "TRAINHOUSE_TRACE_OUTPUT", "TRAINHOUSE_TRACE_SWITCH"

# Runs in each process of the server at its start: writes a line for each call while the switch exists.
HOOK = f"""
import os, sys, threading
root, output, switch = {str(ROOT) + "/"!r}, os.environ.get({OUTPUT!r}), os.environ.get({SWITCH!r})

def is_ours(code):
    return code.co_filename.startswith(root) and "/.venv" not in code.co_filename and not code.co_name.startswith("<")

def trace(frame, event, argument):
    if event != "call" or not is_ours(frame.f_code) or not os.path.exists(switch):
        return
    stack = [frame]
    while frame.f_code.co_name == "cross_entropy" and stack[-1].f_back:
        stack.append(stack[-1].f_back)
    codes = [each.f_code for each in stack if is_ours(each.f_code)]
    names = [code.co_filename[len(root):] + ":" + code.co_qualname for code in codes]
    with open(f"{{output}}.{{os.getpid()}}", "a") as file:
        file.write(" ".join(names) + "\\n")

if output:
    threading.setprofile(trace)
    sys.setprofile(trace)
"""


@dataclass(frozen=True)
class ProcessPath:
    """The part of the path in one process.

    calls: the function of each call, as FILE:QUALNAME, in order. stack: at the loss, innermost first, empty elsewhere.
    """

    calls: list[str]
    stack: list[str]

    @property
    def functions(self) -> set[str]:
        return set(self.calls)

    @property
    def files(self) -> set[str]:
        return {call.partition(":")[0] for call in self.calls}


def trace_request(directory: Path) -> tuple[ProcessPath, ProcessPath]:
    """Returns the path in the server's process and in the worker's."""
    (directory / "sitecustomize.py").write_text(HOOK)
    switch = directory / "switch"
    path = os.pathsep.join(filter(None, (str(directory), os.environ.get("PYTHONPATH"))))
    names = {OUTPUT: str(directory / "trace"), SWITCH: str(switch), "PYTHONPATH": path}
    model = tiny_model("qwen3", directory / "model")
    with environment(names), live_server({"tiny": model}, directory / "state") as server:
        data = [Datum([5, 6, 7, 8], {"target_tokens": [6, 7, 8, 9], "weights": [1.0] * 4})]
        with trainhouse.ServiceClient(server.url, "tml-me") as service:
            client = service.create_lora_training_client("tiny", rank=4)
            for _ in range(2):
                client.forward_backward(data, "cross_entropy").result()
                client.optim_step(AdamParams(learning_rate=1e-4)).result()
            time.sleep(1)  # until nothing of the earlier requests is left to do
            switch.touch()
            client.forward_backward(data, "cross_entropy").result()
            switch.unlink()
    first, second = [read(path) for path in directory.glob("trace.*")]
    return (second, first) if first.stack else (first, second)


@contextmanager
def environment(names: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in names}
    os.environ |= names
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def read(path: Path) -> ProcessPath:
    lines = [line.split() for line in path.read_text().splitlines()]
    return ProcessPath([line[0] for line in lines], max(lines, key=len)[1:])


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        paths = trace_request(Path(directory))
    for name, path in zip(("server", "worker"), paths, strict=True):
        print(f"{name}: {len(path.calls)} calls of {len(path.functions)} functions in {len(path.files)} files")
        most = Counter(call.partition(":")[0] for call in path.calls).most_common(8)
        print("  most called:", ", ".join(f"{file} {number}" for file, number in most))
    functions, files = (
        set.union(*each) for each in zip(*((path.functions, path.files) for path in paths), strict=True)
    )
    print(f"both: {len(functions)} functions in {len(files)} files")
    print(f"{len(paths[1].stack)} frames at the loss:", *paths[1].stack, sep="\n  ")


if __name__ == "__main__":
    sys.exit(main())
