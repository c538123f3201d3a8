"""A tokenizer for tiny models that produces text: byte-level, with merges of several letters, and a chat template."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB = 512
SPECIAL = ("<pad>", "<s>", "</s>", "<tool>")

CHAT_TEMPLATE = """
{%- set state = namespace(turns=0) -%}
{%- if tools %}<s>system
Tools: {% for tool in tools %}{{ tool | tojson(indent=1) }}
{% endfor %}</s>
{% endif -%}
{%- for message in messages -%}
{%- if message.role not in ["system", "user", "assistant", "tool"] -%}
{{- raise_exception("no role " + message.role) -}}
{%- endif -%}
{%- if message.role == "tool" and not message.content -%}{%- continue -%}{%- endif -%}
{%- set state.turns = state.turns + 1 -%}
<s>{{ message["role"] }}{% if message.name is defined %} {{ message.name }}{% endif %}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>
{% endif %}
{% if message.content is defined %}{% generation %}{{ message.content | trim }}{% endgeneration %}{% endif %}
{%- for call in message.tool_calls or [] %}
<tool>{{ call.function | tojson }} {{ call.function.arguments.city }}
{%- endfor %}</s>
{% endfor -%}
{%- if add_generation_prompt %}<s>assistant {{ state.turns }}{{ " briefly" if brief is defined and brief }}
{{ bos_token }}
{%- endif -%}
"""


def letter_tokenizer(vocab_size: int = VOCAB) -> PreTrainedTokenizerFast:
    """Ids 0 to 3 are `SPECIAL`; 2, the end token of tiny models, is </s>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    # A text that does not change: what models sample, and with it what tests find, depends on the tokens.
    tokenizer.train_from_iterator([(Path(__file__).parent.parent / "LICENSE").read_text()], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=CHAT_TEMPLATE
    )


def save_letter_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    tokenizer = letter_tokenizer()
    tokenizer.save_pretrained(directory)
    return tokenizer
