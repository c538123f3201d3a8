"""One reply through tinker-cookbook's recommended renderer, in the cookbook's own process and environment.

PYTHON chat.py MODEL CHECKPOINT QUESTION: PYTHON has tinker-cookbook and none of our packages, MODEL is a name
that the server of TINKER_BASE_URL serves, CHECKPOINT the path of its sampler weights. Prints JSON: the
renderer's name, and the text of the message that the renderer reads from the sampled tokens.
"""

import json
import sys

import tinker
from tinker_cookbook import model_info, renderers
from tinker_cookbook.tokenizer_utils import get_tokenizer

MAX_TOKENS = 24


def main(model_name: str, checkpoint: str, question: str) -> None:
    name = model_info.get_recommended_renderer_name(model_name)
    renderer = renderers.get_renderer(name, get_tokenizer(model_name))
    with tinker.ServiceClient() as service:
        client = service.create_sampling_client(model_path=checkpoint).result()
        prompt = renderer.build_generation_prompt([{"role": "user", "content": question}])
        params = tinker.SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, stop=renderer.get_stop_sequences())
        tokens = client.sample(prompt, num_samples=1, sampling_params=params).result().sequences[0].tokens
    message, _ = renderer.parse_response(tokens)
    print(json.dumps({"renderer": name, "text": renderers.get_text_content(message)}))


if __name__ == "__main__":
    main(*sys.argv[1:4])
