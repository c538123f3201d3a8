"""A stand-in for vLLM with the same protocol, which dies, hangs or changes its answers on demand.

Run `python vllm_stand_in.py DIRECTORY ... --port PORT --served-model-name NAME`. A sample is 0, 1, 2, ..., one number
every 5 ms. In DIRECTORY it writes `visible`, the GPUs that it was given, and a line to `starts` for each start. Files
there change what it does: `refuses` (it ends before it is healthy), `changed` (it counts from 100) and `sees no files`
(it loads no adapters).
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

# A prompt with this first token kills the server after a moment.
FATAL = 13

SECONDS_A_TOKEN = 0.005


class StandIn(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    directory: Path
    model: str
    adapters: list[str]

    def do_GET(self) -> None:
        cards = [{"id": self.model, "max_model_len": 1 << 20}]
        cards += [{"id": name, "parent": self.model} for name in self.adapters]
        self._say(200, {"data": cards})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        match self.path:
            case "/v1/load_lora_adapter" if body["lora_name"] in self.adapters and not body["load_inplace"]:
                self._say(400, {"error": {"message": "it has already been loaded"}})
            case "/v1/load_lora_adapter" if Path(self.directory, "sees no files").exists():
                self._say(400, {"error": {"message": f"No adapter found for {body['lora_path']}"}})
            case "/v1/load_lora_adapter":
                self.adapters.append(body["lora_name"])
                self._say(200, {})
            case "/v1/unload_lora_adapter":
                self.adapters.remove(body["lora_name"])
                self._say(200, {})
            case _ if body["prompt"][0] == FATAL:
                time.sleep(0.2)
                os._exit(1)
            case _ if body.get("stream"):
                self._stream(body)
            case _:
                time.sleep(body["max_tokens"] * SECONDS_A_TOKEN if body["max_tokens"] < 1000 else 0)
                self._say(200, answer(body, range(body["max_tokens"])))

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("connection", "close")
        self.end_headers()
        first = 100 if Path(self.directory, "changed").exists() else 0
        for token in range(first, first + body["max_tokens"]):
            time.sleep(SECONDS_A_TOKEN)
            event = answer(body, range(token, token + 1), ends=token - first == body["max_tokens"] - 1)
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def _say(self, status: int, body: object) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


def answer(body: dict[str, Any], tokens: range, ends: bool = True) -> dict[str, Any]:
    logprobs: dict[str, object] = {"token_logprobs": [-1.2345678901234] * len(tokens)}
    if body["logprobs"]:
        logprobs["top_logprobs"] = [{f"token_id:{token}": -1.2345678901234} for token in tokens]
    choice = {"token_ids": list(tokens), "logprobs": logprobs, "finish_reason": "length" if ends else None}
    return {"choices": [{"index": index, **choice} for index in range(body["n"])]}


def main(directory: Path, options: list[str]) -> None:
    refuses = (directory / "refuses").exists()
    with (directory / "starts").open("a") as starts:
        starts.write(f"{time.monotonic()}\n")
    (directory / "visible").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
    if refuses:
        time.sleep(0.5)
        sys.exit("ValueError: no room for the keys")
    print("ready to serve", flush=True)
    named = dict(pairwise(options))
    StandIn.directory, StandIn.model, StandIn.adapters = directory, named["--served-model-name"], []
    ThreadingHTTPServer(("127.0.0.1", int(named["--port"])), StandIn).serve_forever()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
