"""Runs each example, as its first lines say, against a live server."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest
from trainhouse import ServiceClient
from trainhouse.examples.draft import DraftCheckpoint, earlier_checkpoints

from ..live import LiveServer, live_server

ROOT = Path(__file__).resolve().parents[2]
MODEL = "tiny/chat"


def run(*command: object) -> str:
    done = run_command(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_command(*command: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRAINHOUSE_API_KEY": "tml-examples"}
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=120, env=environment, cwd=ROOT
    )


def values(pattern: str, output: str) -> list[float]:
    return [float(value) for value in re.findall(pattern, output)]


def num_runs(server: LiveServer, key: str) -> int:
    """Returns the number of runs that the key has created."""
    listed = httpx.get(f"{server.url}/api/v1/training_runs", headers={"X-API-Key": key}).raise_for_status()
    return listed.json()["cursor"]["total_count"]


@pytest.fixture
def short_text(tmp_path: Path) -> Path:
    """A part of the training data of the examples."""
    lines = (ROOT / "examples" / "pirate.jsonl").read_text().splitlines()
    parts = ([line for line in lines if f'"{split}"' in line][:num] for split, num in (("train", 40), ("held_out", 12)))
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join(chain.from_iterable(parts)))
    return path


def sft_command(server: LiveServer, data: Path) -> list[object]:
    return [sys.executable, "examples/sft.py", "--base-url", server.url, "--model", MODEL, "--data", data]


@pytest.mark.slow
def test_sft_lowers_the_held_out_loss_and_resumes_where_it_stopped(shared_server: LiveServer, short_text: Path) -> None:
    command = sft_command(shared_server, short_text)
    options = ["--steps", 6, "--warmup", 2, "--eval-every", 3, "--batch-size", 4, "--learning-rate", 1e-2]
    output = run(*command, *options)
    held_out = values(r"held-out loss ([\d.]+)", output)
    assert len(held_out) == 3 and held_out[-1] < held_out[0]
    rates = values(r"learning rate ([\d.e+-]+)", output)
    assert rates[0] == pytest.approx(5e-3) and max(rates) == rates[1] == pytest.approx(1e-2) and rates[-1] < 2e-3
    checkpoint = re.search(r"saved (tinker://\S+/step-000003)", output)
    assert checkpoint
    resumed = run(*command, *options, "--resume", checkpoint[1])
    assert values(r"held-out loss ([\d.]+)", resumed)[0] == held_out[1]
    losses = values(r"learning rate .* loss ([\d.]+)", output)
    assert values(r"learning rate .* loss ([\d.]+)", resumed) == losses[3:]
    assert values(r"held-out loss ([\d.]+)", resumed) == held_out[1:]


CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}


@pytest.mark.parametrize(
    ("data", "counts"),
    [
        ([CHAT], "1 rows to train on, 0 held out"),
        ([CHAT] * 3, "2 rows to train on, 1 held out"),
        ([{"prompt": "one ", "completion": "1"}] * 20, "18 rows to train on, 2 held out"),
        ([{"question": "one", "answer": "1", "split": "train"}], "1 rows to train on, 0 held out"),
    ],
)
def test_sft_trains_on_any_rows(
    shared_server: LiveServer, tmp_path: Path, data: list[dict[str, Any]], counts: str
) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, data)) + "\n\n")
    output = run(*sft_command(shared_server, path), "--steps", 3, "--eval-every", 2)
    assert counts in output and len(values(r"learning rate .* loss ([\d.]+)", output)) == 3
    assert re.findall(r"saved \S+/(step-\d+)", output) == ["step-000002", "step-000003"]
    assert ("held-out loss" in output) == (", 0 held out" not in output)


def test_sft_refuses_what_it_cannot_resume_or_train_on(shared_server: LiveServer, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps(CHAT | {"split": "held_out"}))
    for more, words in (((), "has no rows to train on"), (("--resume", "tinker://a/weights/best"), "is not a check")):
        done = run_command(*sft_command(shared_server, path), *more)
        assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr


DRAFTS: dict[str, list[object]] = {
    # Trained on samples of the target, with a smaller vocabulary than the target's.
    "eagle3": ["--rollouts", 1, "--max-tokens", 16, "--temperature", 0.5, "--draft-vocab-size", 256],
    "dflash": [],
}


def draft_command(server: LiveServer, algorithm: str, data: Path) -> list[object]:
    command = [sys.executable, "examples/draft.py", "--base-url", server.url, "--model", MODEL, "--data", data]
    options = ["--warmup", 2, "--eval-every", 2, "--batch-size", 8, "--learning-rate", 1e-2]
    return [*command, "--algorithm", algorithm, *options, *DRAFTS[algorithm]]


@dataclass(frozen=True)
class DraftRun:
    """The printed results of the example.

    held_out: acceptance lengths.
    saved: path -> acceptance length.
    best: path of the best checkpoint.
    """

    held_out: list[float]
    held_out_losses: list[float]
    losses: list[float]
    saved: dict[str, float]
    best: str

    @staticmethod
    def parse(output: str) -> "DraftRun":
        found = re.findall(r"held-out acceptance length ([\d.]+).* saved (tinker://\S+)", output)
        (best,) = re.findall(r"best: .*(tinker://\S+)", output)
        return DraftRun(
            values(r"held-out acceptance length ([\d.]+)", output),
            values(r"held-out .*loss ([\d.]+)", output),
            values(r"learning rate .*loss ([\d.]+)", output),
            {path: float(length) for length, path in found},
            best,
        )


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["eagle3", pytest.param("dflash", marks=pytest.mark.full)])
def test_a_draft_learns_and_resumes_where_it_stopped(
    shared_server: LiveServer, short_text: Path, algorithm: str
) -> None:
    command = [*draft_command(shared_server, algorithm, short_text), "--steps", 5]
    whole = DraftRun.parse(run(*command))
    assert whole.held_out[-1] > whole.held_out[0] + 0.02
    assert whole.held_out_losses[-1] < 0.98 * whole.held_out_losses[0]
    # After each second step, and after the last one.
    steps = [int(re.findall(r"/step-(\d+)-", path)[0]) for path in whole.saved]
    assert steps == [2, 4, 5] and list(whole.saved.values()) == whole.held_out[1:]
    assert whole.best == max(whole.saved, key=whole.saved.__getitem__)

    first = next(iter(whole.saved))
    resumed = DraftRun.parse(run(*command, "--resume", first))
    assert resumed.losses == pytest.approx(whole.losses[2:], abs=2e-3)
    assert resumed.held_out_losses == pytest.approx(whole.held_out_losses[1:], abs=2e-3)
    assert resumed.held_out == pytest.approx(whole.held_out[1:], abs=0.01)
    # Checkpoints after the one that was resumed do not belong to the resumed run.
    candidates = {first: whole.saved[first]} | resumed.saved
    assert resumed.best == max(candidates, key=candidates.__getitem__)
    assert resumed.losses != pytest.approx(whole.losses[1:-1], abs=0.1), "other steps have other losses"


@pytest.mark.full
def test_training_on_captured_features_equals_online_training(shared_server: LiveServer, short_text: Path) -> None:
    command = [*draft_command(shared_server, "dflash", short_text), "--steps", 3]
    online, offline = (DraftRun.parse(run(*command, *more)) for more in ((), ("--captured",)))
    assert offline.losses == pytest.approx(online.losses, abs=2e-3)
    assert offline.held_out_losses == pytest.approx(online.held_out_losses, abs=2e-3)
    assert offline.losses != pytest.approx([*online.losses[1:], 0.0], abs=2e-3)
    with ServiceClient(shared_server.url, "tml-watching") as service:
        features = service.get_workers().features
        assert features is not None and features.num_references == 0, "features are released with their runs"


@pytest.mark.slow
def test_a_draft_reads_its_target_in_the_chosen_form_and_keeps_it_when_resumed(
    shared_server: LiveServer, short_text: Path
) -> None:
    command = [*draft_command(shared_server, "eagle3", short_text), "--steps", 2, "--captured"]
    forms = {"hidden_state": [], "logits": [], "pruned_logits": ["--target-top-k", 1]}
    printed = {form: run(*command, "--target-repr", form, *more) for form, more in forms.items()}
    runs = {form: DraftRun.parse(output) for form, output in printed.items()}
    sizes = {form: values(r"captured \d+ tokens: (\d+) bytes per token", output)[0] for form, output in printed.items()}
    assert sizes["pruned_logits"] < sizes["hidden_state"] < sizes["logits"]
    assert runs["logits"].losses == pytest.approx(runs["hidden_state"].losses, abs=2e-3)
    assert runs["pruned_logits"].losses != pytest.approx(runs["hidden_state"].losses, abs=2e-3), "one logit is too few"

    resumed = [*command, "--steps", 3, "--resume", next(iter(runs["logits"].saved))]
    assert len(DraftRun.parse(run(*resumed)).losses) == 1
    refused = run_command(*resumed, "--target-repr", "hidden_state")
    assert refused.returncode == 2
    assert "is of a draft with target_repr logits, and --target-repr is hidden_state" in refused.stderr


def test_earlier_checkpoints_are_found_after_repeated_resumes(shared_server: LiveServer) -> None:
    resumed, on_the_way = None, []
    for steps, last in (((2, 4), 2), ((4, 6, 8), 6), ((7, 8, 9), 9)):
        metadata = {"resumed": resumed} if resumed else None
        with ServiceClient(shared_server.url, "tml-resumed", metadata) as service:
            if resumed:
                draft = service.create_training_client_from_state_with_optimizer(resumed)
            else:
                draft = service.create_draft_client(MODEL, "dflash", seed=0)
            paths = {step: draft.save_state(DraftCheckpoint.name(step, 1 + 1 / step)).result().path for step in steps}
            on_the_way += [paths[step] for step in steps if step <= last]
            resumed = paths[last]
            assert [each.path for each in earlier_checkpoints(service, resumed)] == on_the_way
    assert [DraftCheckpoint.parse(path).step for path in on_the_way] == [2, 4, 6, 7, 8, 9]
    assert [DraftCheckpoint.parse(path).acceptance_length for path in on_the_way[:2]] == [1.5, 1.25]
    with pytest.raises(ValueError, match="not a checkpoint of this script"):
        DraftCheckpoint.parse("tinker://run/weights/step-3")


@pytest.mark.slow
def test_checkpoints_of_another_kind_cannot_be_resumed(shared_server: LiveServer, short_text: Path) -> None:
    with ServiceClient(shared_server.url, "tml-examples") as service:
        draft = service.create_draft_client(MODEL, "eagle3")
        policy = service.create_lora_training_client(MODEL, rank=1)
        of_draft, of_policy = (each.save_state(DraftCheckpoint.name(2, 1.5)).result().path for each in (draft, policy))
        other_name = draft.save_state("mine").result().path
    for path, reason in (
        (of_draft, "is of a draft of eagle3, and --algorithm is dflash: resume it with --algorithm eagle3"),
        (of_policy, "is a checkpoint of a policy, not of a draft: resume that of a draft"),
        (other_name, "is not a checkpoint of this script: these are named step-N-acceptance-A"),
    ):
        command = [*draft_command(shared_server, "dflash", short_text), "--resume", path]
        done = run_command(*command)
        assert (done.returncode, done.stderr) == (2, f"draft.py: error: {path} {reason}\n")


@pytest.mark.slow
def test_each_step_is_printed_at_once(shared_server: LiveServer, short_text: Path) -> None:
    command = [str(each) for each in [*draft_command(shared_server, "dflash", short_text), "--steps", 1000]]
    environment = {name: each for name, each in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env=environment) as process:
        assert process.stdout is not None
        output = os.read(process.stdout.fileno(), 1 << 16)
        process.terminate()
        process.stdout.read()
    assert output.startswith(b"held-out") and output.count(b"\n") < 5


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["importance_sampling", pytest.param("ppo", marks=pytest.mark.full)])
def test_the_reward_of_the_rl_loop_rises(shared_server: LiveServer, loss: str) -> None:
    command = [sys.executable, "examples/rl_loop.py", "--base-url", shared_server.url, "--model", MODEL]
    output = run(*command, "--loss", loss, "--steps", 15, "--samples", 16, "--tokens", 6, "--learning-rate", 1e-2)
    rewards = values(r"reward ([\d.]+)", output)
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15


@pytest.mark.full
def test_the_reward_of_the_ppo_example_rises_and_its_steps_are_counted(shared_server: LiveServer) -> None:
    check_ppo(shared_server)


@pytest.mark.full
@pytest.mark.parametrize("shared_devices", ["together", "turns"])
def test_the_ppo_example_works_with_critics_and_references_in_separate_groups(
    shared_devices: str, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    apart: dict[str, Any] = {"role_group": ["critic=single", "reference=single"], "shared_devices": shared_devices}
    with live_server({MODEL: tiny_models["llama"]}, tmp_path / "state", **apart) as server:
        check_ppo(server)


def check_ppo(server: LiveServer) -> None:
    command = [sys.executable, "examples/ppo.py", "--base-url", server.url, "--model", MODEL]
    # 48 episodes, 20 at a time: 3 mini-batches, the last one of 8.
    options = ["--iterations", 10, "--samples", 12, "--tokens", 6, "--mini-batch", 20, "--learning-rate", 1e-2]
    output = run(*command, *options)
    rewards, divergences = values(r"reward ([\d.]+)", output), values(r"kl +(-?[\d.]+)", output)
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1
    assert values(r"optimizer steps (\d+)", output) == [6.0 * (number + 1) for number in range(10)]
    # Policy and reference are equal before the first step and diverge until the reference is updated.
    assert divergences[0] == 0 and divergences[-1] > 0.01
    moved = values(r"kl +(-?[\d.]+)", run(*command, *options, "--move-reference-every", 4))
    assert moved[:4] == pytest.approx(divergences[:4], abs=1e-4)
    assert moved[4] == pytest.approx(0, abs=1e-4) and abs(divergences[4]) > 1e-3


def test_curl_trains_saves_and_samples(shared_server: LiveServer) -> None:
    output = run("env", "KEY=tml-curl", "bash", "examples/curl.sh", shared_server.url, MODEL)
    assert num_runs(shared_server, "tml-curl") == 1
    losses = values(r'"loss:sum": *([\d.]+)', output)
    assert len(losses) == 3 and losses[2] < losses[0]
    assert re.search(r'"path": *"tinker://[^"]+/weights/from-curl"', output)
    assert re.search(r'"tokens": *\[\d+, *\d+, *\d+, *\d+\]', output)


@pytest.mark.slow
def test_the_official_sdk_trains_saves_and_samples(shared_server: LiveServer) -> None:
    # The default of 5e-4 is for a real model and barely changes a tiny one.
    command = [sys.executable, "examples/official_sdk.py", "--model", MODEL, "--learning-rate", "5e-3"]
    output = run("env", "TINKER_API_KEY=tml-official", f"TINKER_BASE_URL={shared_server.url}", *command)
    assert num_runs(shared_server, "tml-official") == 1
    losses = values(r"loss ([\d.]+)", output)
    assert losses[-1] < losses[0]
    assert "saved tinker://" in output and "sampled [" in output


@pytest.mark.slow
def test_the_demo_program_trains_and_prints_completions(shared_server: LiveServer) -> None:
    output = run(
        *(sys.executable, "-m", "trainhouse.examples.demo", "--base-url", shared_server.url, "--model", MODEL),
        *("--steps", 4, "--batch-size", 2, "--max-tokens", 4),
    )
    assert "Completions before:" in output and "Completions after:" in output
    assert len(values(r"step .* loss ([\d.]+)", output)) == 4
    assert "checkpoint tinker://" in output


def run_rest_guide(server: LiveServer, model: str, script: Path) -> str:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "rest.md").read_text(), re.DOTALL)
    # `-o pipefail`: a refused request inside $(...) ends the script, too.
    script.write_text("set -euxo pipefail\n" + "\n".join(blocks))
    output = run("env", f"SERVER={server.url}", "KEY=tml-rest-guide", f"MODEL={model}", "bash", script)
    assert len(blocks) > 10
    assert '"error"' not in output
    assert output.count('"loss:sum"') == 5 and output.count('"stop_reason"') == 5
    return output


def test_every_request_of_the_rest_guide_works(shared_server: LiveServer, tmp_path: Path) -> None:
    assert '{"files":' in run_rest_guide(shared_server, MODEL, tmp_path / "rest.sh")


@pytest.mark.full
def test_the_rest_guide_works_with_a_model_without_a_tokenizer(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    with live_server({"tiny/qwen3": tiny_models["qwen3"]}, tmp_path / "state") as server:
        assert "has no tokenizer" in run_rest_guide(server, "tiny/qwen3", tmp_path / "rest.sh")
