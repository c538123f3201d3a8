"""Uses the official Tinker SDK, unmodified, with this server.

pip install tinker==0.38.0 transformers
python examples/official_sdk.py [--base-url URL] [--model MODEL]
TINKER_BASE_URL sets the server's URL, TINKER_API_KEY the key; tml-local unless set.
"""

import argparse
import os

import tinker
from tinker import types


def main() -> None:
    options = parse_options()
    api_key = os.environ.get("TINKER_API_KEY", "tml-local")
    with tinker.ServiceClient(base_url=options.base_url, api_key=api_key) as service:
        client = service.create_lora_training_client(options.model, rank=8).result()
        tokenizer = client.get_tokenizer()
        tokens = tokenizer.encode("The house that trains models stands by the sea.")
        datum = types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[len(tokens) - 1]),
                "weights": types.TensorData(data=[1.0] * (len(tokens) - 1), dtype="float32", shape=[len(tokens) - 1]),
            },
        )
        for step in range(10):
            passed = client.forward_backward([datum], "cross_entropy")
            stepped = client.optim_step(types.AdamParams(learning_rate=options.learning_rate))
            print(f"step {step + 1:2d}  loss {passed.result().metrics['loss:sum']:.4f}")
            stepped.result()
        print("saved", client.save_state("official-sdk").result().path)
        sampler = client.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[])
        response = sampler.sample(
            types.ModelInput.from_ints(tokens[:4]), num_samples=1, sampling_params=params
        ).result()
        print("sampled", list(response.sequences[0].tokens))
        print("in words", repr(tokenizer.decode(response.sequences[0].tokens)))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default=os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    return parser.parse_args()


if __name__ == "__main__":
    main()
