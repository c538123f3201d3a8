"""tinker-cookbook's recipes, unchanged, on tiny models served under their default names: `make test-cookbook`.

Data sets and tokenizers are local files: `load_dataset` prefers a directory of a data set's name, and HF_HOME holds
the tokenizers, whose special tokens are those of the models' renderers.
"""

import json
import math
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from ..hub_cache import add_to_hub_cache
from ..live import live_server, save_byte_tokenizer
from ..tiny import tiny_model

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

CHAT = Path(__file__).with_name("cookbook_chat.py")
BASE, QWEN, GPT_OSS, KIMI = "Qwen/Qwen3.5-9B-Base", "Qwen/Qwen3.5-4B", "openai/gpt-oss-20b", "moonshotai/Kimi-K2.6"
KINDS = {BASE: "qwen3_5", QWEN: "qwen3_5", GPT_OSS: "gpt_oss", KIMI: "deepseek_v3"}
OF_QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
OF_HARMONY = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"]
OF_KIMI = ["<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>", "<think>", "</think>"]
RENDERERS = {BASE: "role_colon", QWEN: "qwen3_5", GPT_OSS: "gpt_oss_no_sysprompt", KIMI: "kimi_k26"}
SPECIALS = {BASE: OF_QWEN, QWEN: OF_QWEN, GPT_OSS: OF_HARMONY, KIMI: OF_KIMI}
KIMI_COMMIT = "b5aabbfb20227ed42becbf5541dbffd213942c58"
"""The only revision of Kimi's tokenizer, a class of its own, that the cookbook loads."""
KIMI_TOKENIZER = """
from transformers import PreTrainedTokenizerFast

class TikTokenTokenizer(PreTrainedTokenizerFast):
    pass
"""
QUESTION_SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
"""The math recipes add it to each question."""
LEARNING_RATE = 1e-2
RECIPE_SECONDS = 400


@dataclass(frozen=True)
class Run:
    """The metrics and checkpoints that a recipe writes to its logs."""

    metrics: list[dict[str, Any]]
    checkpoints: list[dict[str, Any]]

    def finite(self, name: str) -> list[float]:
        values = [step[name] for step in self.metrics if name in step]
        assert values and all(math.isfinite(value) for value in values), (name, self.metrics)
        return values


@dataclass(frozen=True)
class Cookbook:
    """Runs programs of tinker-cookbook as a user of the server at `url`, in a folder with data sets and tokenizers."""

    python: str
    folder: Path
    url: str

    def recipe(self, module: str, log: str, **options: object) -> Run:
        """Runs tinker_cookbook.recipes.`module`; its logs go to `log`, where it resumes from a checkpoint."""
        flags = [f"{name}={value}" for name, value in ({"log_path": self.folder / log} | options).items()]
        self.run("-m", f"tinker_cookbook.recipes.{module}", *flags)
        return Run(json_lines(self.folder / log / "metrics.jsonl"), json_lines(self.folder / log / "checkpoints.jsonl"))

    def chat(self, model: str, taught: Run) -> dict[str, str]:
        """Asks the last checkpoint a question that was taught."""
        question = "What is 1 plus 2?" + QUESTION_SUFFIX
        return json.loads(self.run(str(CHAT), model, taught.checkpoints[-1]["sampler_path"], question))

    def run(self, *arguments: str) -> str:
        environment = os.environ | {"TINKER_BASE_URL": self.url, "TINKER_API_KEY": "tml-cookbook"}
        environment |= {"TINKER_TELEMETRY": "0", "OMP_NUM_THREADS": "1"}
        environment |= {"HF_HOME": str(self.folder / "hf"), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [self.python, *arguments],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RECIPE_SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return done.stdout


@pytest.fixture(scope="module")
def cookbook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cookbook]:
    python = os.environ.get("TRAINHOUSE_COOKBOOK_PYTHON")
    if not python:
        pytest.skip("TRAINHOUSE_COOKBOOK_PYTHON names no Python that has tinker-cookbook: make test-cookbook")
    folder = tmp_path_factory.mktemp("cookbook")
    models = {name: release(name, folder / "models" / name) for name in KINDS}
    for name, directory in models.items():
        commit = KIMI_COMMIT if name == KIMI else "0" * 40
        add_to_hub_cache(folder / "hf", name, directory, commit)
    write_datasets(folder)
    with live_server(models, folder / "state") as server:
        yield Cookbook(python, folder, server.url)


def release(name: str, directory: Path) -> Path:
    """Writes a tiny random model with the tokenizer and the files that the model of this name has."""
    tiny_model(KINDS[name], directory, max_position_embeddings=4096)
    save_byte_tokenizer(directory, SPECIALS[name])
    if name == KIMI:
        as_kimi(directory)
    return directory


def as_kimi(directory: Path) -> None:
    """Puts the text model into the container of the release, and its tokenizer into a class of its own."""
    weights = {f"language_model.{name}": each for name, each in load_file(directory / "model.safetensors").items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((directory / "config.json").read_text()) | {"model_type": "kimi_k2"}
    (directory / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": text}))
    (directory / "tokenization_kimi.py").write_text(KIMI_TOKENIZER)
    tokenizer = json.loads((directory / "tokenizer_config.json").read_text())
    tokenizer |= {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))


def write_datasets(folder: Path) -> None:
    """Writes questions with the answers 3 and 4, under the names of the recipes' data sets."""
    sums = [(f"What is {left} plus {answer - left}?", answer) for answer in (3, 4) for left in range(8)]
    chats = [
        {
            "messages": [
                {"role": "user", "content": question + QUESTION_SUFFIX},
                {"role": "assistant", "content": f"\\boxed{{{answer}}}"},
            ]
        }
        for question, answer in sums
    ]
    problems = [{"question": question, "answer": f"#### {answer}"} for question, answer in sums[::2]]
    # Evaluation is by whole batches, of 128 in sl_basic.
    write_splits(folder / "HuggingFaceH4/no_robots", {"train": chats * 32, "test": chats * 8})
    write_splits(folder / "openai/gsm8k", {"train": problems, "test": problems})
    (folder / "openai/gsm8k/README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n"
        "  - split: train\n    path: train.jsonl\n  - split: test\n    path: test.jsonl\n---\n"
    )


def write_splits(directory: Path, splits: dict[str, list[dict[str, Any]]]) -> None:
    directory.mkdir(parents=True)
    for name, rows in splits.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def taught(cookbook: Cookbook) -> Run:
    return cookbook.recipe("sl_loop", "sl-loop", batch_size=16, learning_rate=LEARNING_RATE)


def test_sl_loop_teaches(cookbook: Cookbook, taught: Run) -> None:
    check_taught(taught)
    check_reply(cookbook, BASE, taught)


def test_rl_loop_continues_what_sl_loop_taught(cookbook: Cookbook, taught: Run) -> None:
    check_rl_loop(cookbook, BASE, taught)


@pytest.mark.parametrize("model", [QWEN, GPT_OSS, KIMI])
def test_chat_sl_and_rl_loop_with_the_renderer_of(model: str, cookbook: Cookbook) -> None:
    log = f"chat-sl/{model}"
    taught = cookbook.recipe("chat_sl.train", log, model_name=model, batch_size=16, learning_rate=LEARNING_RATE)
    check_taught(taught)
    check_reply(cookbook, model, taught)
    check_rl_loop(cookbook, model, taught)


def check_taught(run: Run) -> None:
    """Both answers are as frequent: what cannot be learned is one bit of each reply."""
    losses = run.finite("train_mean_nll")
    assert len(losses) == 32 and losses[-1] < losses[0] / 20, losses
    assert run.finite("optimizer_step:last") == [*range(1, 33)]
    assert [each["name"] for each in run.checkpoints] == ["000020", "final"]


def check_reply(cookbook: Cookbook, model: str, taught: Run) -> None:
    reply = cookbook.chat(model, taught)
    assert reply["renderer"] == RENDERERS[model]
    assert reply["text"] in ("\\boxed{3}", "\\boxed{4}")


def check_rl_loop(cookbook: Cookbook, model: str, taught: Run) -> None:
    """The recipe resumes from the last checkpoint in its logs, here a taught one; its loss is stable_reinforce."""
    log = f"rl-loop/{model}"
    (cookbook.folder / log).mkdir(parents=True)
    start = {"name": "taught", "batch": 0, "state_path": taught.checkpoints[-1]["state_path"]}
    (cookbook.folder / log / "checkpoints.jsonl").write_text(json.dumps(start) + "\n")
    run = cookbook.recipe("rl_loop", log, model_name=model, batch_size=4, group_size=8, max_tokens=24)
    assert all(0 < reward < 1 for reward in run.finite("reward/total")), run.metrics
    assert len(run.finite("loss/stable_reinforce")) == 2
    assert run.finite("optimizer_step:last") == [33, 34]
    assert run.checkpoints[-1]["sampler_path"]


def test_sl_basic_lowers_the_loss_on_held_out_rows(cookbook: Cookbook) -> None:
    run = cookbook.recipe("sl_basic", "sl-basic", learning_rate=LEARNING_RATE, num_epochs=2, eval_every=4)
    trained, tested = run.finite("train_mean_nll"), run.finite("test/nll")
    assert len(trained) == 8 and trained[-1] < trained[0] / 2, trained
    assert len(tested) == 2 and tested[1] < tested[0] / 1.5, tested
    assert run.checkpoints[-1]["sampler_path"]


def test_rl_basic_continues_what_sl_loop_taught(cookbook: Cookbook, taught: Run) -> None:
    start = taught.checkpoints[-1]["state_path"]
    run = cookbook.recipe("rl_basic", "rl-basic", max_tokens=24, load_checkpoint_path=start)
    check_rollouts(run, num_steps=1)
    assert run.finite("env/all/total_episodes") == [128]
    assert 0 < run.finite("env/all/correct")[0] < 1


def test_preference_with_the_default_model(cookbook: Cookbook) -> None:
    options = {"batch_size": 2, "group_size": 4, "max_steps": 2, "max_tokens": 24}
    run = cookbook.recipe("preference.shorter.train", "shorter", **options)
    check_rollouts(run, num_steps=2)
    assert len(run.finite("kl_pre_post_v1")) == 2


def test_game_of_many_turns_with_the_default_model(cookbook: Cookbook) -> None:
    options = {"batch_size": 1, "group_size": 2, "max_steps": 1, "max_tokens": 16, "eval_every": 0}
    run = cookbook.recipe("multiplayer_rl.guess_number.train", "guess-number", **options)
    check_rollouts(run, num_steps=1)
    assert run.finite("env/all/turns_per_episode") == [10]
    assert run.finite("env/all/total_cached_ob_tokens")[0] > 0


def check_rollouts(run: Run, num_steps: int) -> None:
    """The sampler's log-probabilities are those that training computes."""
    assert all(sampled > 1 for sampled in run.finite("env/all/ac_tokens_per_turn"))
    assert len(run.finite("loss/importance_sampling")) == num_steps
    assert run.finite("optimizer_step:last") == [*range(1, num_steps + 1)]
    assert all(distance < 1e-9 for distance in run.finite("optim/kl_sample_train_v2"))
    assert run.checkpoints[-1]["sampler_path"]
