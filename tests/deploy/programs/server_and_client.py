"""Run in an environment that has the server: trains a model of two layers, and reads the pages that need its files."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import torch
import trainhouse
from transformers import LlamaConfig, LlamaForCausalLM

assert Path(trainhouse.__file__).is_relative_to(sys.prefix), trainhouse.__file__
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
torch.manual_seed(0)

with tempfile.TemporaryDirectory() as scratch:
    directory, ready, log = (Path(scratch) / name for name in ("model", "ready", "log"))
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64)).save_pretrained(directory)
    command = [Path(sys.executable).with_name("trainhouse"), "serve", f"--base-model=tiny={directory}", "--port=0"]
    command += [f"--state-dir={scratch}/state", f"--ready-file={ready}", "--threads=1"]
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 120
        while not ready.exists():
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        url = ready.read_text().strip()
        with trainhouse.ServiceClient(url, "tml-me") as service:
            client = service.create_lora_training_client("tiny", rank=4)
            datum = trainhouse.Datum([1, 2, 3], {"target_tokens": [2, 3, 4], "weights": [1.0] * 3})
            losses = []
            for _ in range(3):
                losses.append(client.forward_backward([datum], "cross_entropy").result().metrics["loss:sum"])
                client.optim_step(trainhouse.AdamParams(learning_rate=1e-2)).result()
            assert losses[-1] < losses[0], losses
            sampler = client.save_weights_and_get_sampling_client()
            sampler.sample([1, 2], 1, trainhouse.SamplingParams(max_tokens=2)).result()
        for page in ("docs", "docs/swagger-ui.css", "openapi.json", "console"):
            answer = httpx.get(f"{url}/{page}", follow_redirects=True, headers={"Accept": "text/html"})
            assert answer.is_success, (page, answer.status_code)
    finally:
        server.terminate()
        assert server.wait(60) == 0, log.read_text()
print(f"server and client: losses {', '.join(f'{loss:.2f}' for loss in losses)}")
