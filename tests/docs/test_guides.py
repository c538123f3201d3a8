"""The guides' code runs against a live server, and what they promise about its results holds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..live import LiveServer, live_server, save_byte_tokenizer
from ..tiny import tiny_model
from .pages import run_page

pytestmark = pytest.mark.slow

GUIDES = Path(__file__).resolve().parents[2] / "docs" / "guides"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The guides' model: here a tiny random one has its name."""
CHATML = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
PROMISES = {
    "custom-losses.md": "losses[-1] < 0.9 * losses[0] and difference < 1e-6 and abs(by_hand - by_torch) < 1e-2",
    "drafts.md": "after > before + 0.1 and same",
    "distillation.md": "np.mean(divergences[-4:]) < 0.8 * np.mean(divergences[:4]) and losses[-1] < 0.95 * losses[0]",
    "dpo.md": "round(losses[0], 3) == 0.693 and losses[-1] < 0.6 and accuracy > 0.9",
    "ppo.md": "mean(rewards[-3:]) > mean(rewards[:3]) + 0.1",
    "rl.md": "mean(rewards[-3:]) > mean(rewards[:3]) + 0.1 and mean(later[-3:]) > mean(later[:3]) + 0.1",
    "sft.md": "after < 0.9 * before and continued == after",
}
"""Page -> what its names satisfy after its code has run."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = tiny_model("llama", tmp_path_factory.mktemp("chat"))
    save_byte_tokenizer(model, ("<|im_start|>", "<|im_end|>"))
    (model / "chat_template.jinja").write_text(CHATML)
    with live_server({MODEL: model}, tmp_path_factory.mktemp("state")) as server:
        yield server


@pytest.mark.parametrize("page", sorted(GUIDES.glob("*.md")), ids=lambda page: page.name)
def test_a_guide_does_what_it_promises(
    page: Path, server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_page(page, server.url)
    assert eval(PROMISES.get(page.name, "True"), names), PROMISES[page.name]
