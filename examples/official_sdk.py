"""The official Tinker SDK, unmodified, against this server: pip install tinker==0.38.0

.venv/bin/python examples/official_sdk.py http://127.0.0.1:8000 MODEL
TINKER_API_KEY is the key, where made-up ones do not work.
"""

import os
import sys

import tinker
from tinker import types


def main(base_url: str, model: str) -> None:
    api_key = os.environ.get("TINKER_API_KEY", "tml-local")
    with tinker.ServiceClient(base_url=base_url, api_key=api_key) as service:
        client = service.create_lora_training_client(model, rank=8).result()
        tokens = list(range(10, 30))
        datum = types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[len(tokens) - 1]),
                "weights": types.TensorData(data=[1.0] * (len(tokens) - 1), dtype="float32", shape=[len(tokens) - 1]),
            },
        )
        for step in range(10):
            passed = client.forward_backward([datum], "cross_entropy")
            stepped = client.optim_step(types.AdamParams(learning_rate=5e-3))
            print(f"step {step + 1:2d}  loss {passed.result().metrics['loss:sum']:.4f}")
            stepped.result()
        print("saved", client.save_state("official-sdk").result().path)
        sampler = client.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[])
        response = sampler.sample(
            types.ModelInput.from_ints(tokens[:4]), num_samples=1, sampling_params=params
        ).result()
        print("sampled", list(response.sequences[0].tokens))


if __name__ == "__main__":
    main(*sys.argv[1:])
