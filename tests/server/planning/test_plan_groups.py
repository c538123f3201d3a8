"""`trainhouse plan` with role groups, samplers and shared devices: its numbers, its refusals, and `serve`'s."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from trainhouse.server import __main__ as command_line

from ...live import LiveServer, flags_of, live_server
from ..real import ALICE, MODEL, sample_body
from ..runs.test_restart import DATA, Client
from ..runs.test_roles import VALUES
from .test_plan import main

ROOT = Path(__file__).resolve().parents[3]
LLAMA = f"--base-model=M={ROOT}/tests/workers/configs/Llama-3.1-8B.json"
SHORT = "--max-context-length=8192"


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    status = main([*arguments, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert status == (1 if found["fits"] is False else 0)
    return found


def test_vllm_takes_its_share_of_its_devices(capsys: pytest.CaptureFixture[str]) -> None:
    """Llama-3.1-8B has 8,030,261,248 parameters, of which each of two devices has half, in 16 bits."""
    vllm = (LLAMA, SHORT, "--device-memory=80GB", "--sampler=vllm")
    apart = planned(capsys, *vllm, "--device=cuda:0", "--sampler-device=cuda:1,cuda:2", "--vllm-tp=2")
    own, (held,) = apart["groups"]["M"], apart["groups"]["M (vLLM)"]["phases"].values()
    assert held["weights"] == 8030261248 and held["kv_cache"] == 72 * 10**9 - 8030261248 and apart["fits"]
    assert "sampling" not in own["phases"] and own["waiting"]["kv_cache"] == 0, "the policies do not sample"
    assert [each["names"] for each in apart["devices"]] == [["cuda:0"], ["cuda:1", "cuda:2"]]
    assert apart["devices"][1]["needed"] == 72 * 10**9
    unnamed = planned(capsys, *vllm, "--vllm-tp=2")
    assert unnamed["groups"]["M (vLLM)"]["devices"] == ["cuda:0", "cuda:1"]
    elsewhere = planned(capsys, *vllm, "--vllm-url=http://gpu-host:8000")
    assert list(elsewhere["groups"]) == ["M"] and elsewhere["groups"]["M"] == own
    # On the device of training both need memory at once.
    shared = planned(capsys, *vllm, "--vllm-memory-share=0.5")
    alone = apart["devices"][0]["needed"]
    assert shared["devices"][0]["needed"] == alone + 40 * 10**9 + 500_000_000 and not shared["fits"]
    assert planned(capsys, *vllm, "--vllm-memory-share=0.5", "--sampler-device=cuda:1")["fits"]
    # Others take turns next to it; it moves nothing.
    turns = (*vllm, "--vllm-memory-share=0.3", "--shared-devices=turns", "--role-group=critic=single")
    several = planned(capsys, *turns, "--activations=recompute")
    peaks = [max(each["total"] for each in group["phases"].values()) for group in several["groups"].values()]
    assert several["devices"][0]["needed"] == max(peaks[:2]) + 24 * 10**9 + 2 * 500_000_000
    assert list(several["moving"]) == ["M", "M (critic)"]


def test_a_vllm_alone_on_its_device_may_have_nearly_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    alone = (LLAMA, SHORT, "--device-memory=80GB", "--sampler=vllm", "--device=cuda:0", "--sampler-device=cuda:1")
    plan = planned(capsys, *alone, "--vllm-memory-share=0.95")
    ours, of_vllm = plan["devices"]
    assert plan["fits"] and of_vllm["needed"] == 76 * 10**9
    assert ours["usable"] == plan["usable"] == 73_600_000_000 and of_vllm["usable"] == 79_500_000_000
    main([*alone, "--vllm-memory-share=0.95"])
    assert "fits: needs 76.0 GB of 79.5 GB\n" in capsys.readouterr().out
    # Its CUDA context is not part of its share.
    whole = planned(capsys, *alone, "--vllm-memory-share=1")
    assert not whole["fits"] and whole["remedies"] == ["vLLM takes 80.0 GB: lower --vllm-memory-share"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--vllm-tp=2 --device=cuda:3",
            "--vllm-tp 2 needs as many devices, and vLLM has cuda:3: name them all, as in --sampler-device cuda:1,",
        ),
        ("--vllm-memory-share=0.1", "vLLM has 8.0 GB of each device, and its part of the weights is 16.1 GB: raise"),
        ("--sampler-parallel=tp=2", "vllm_tp sets how many GPUs share"),
        ("--device=cpu", "a vLLM on CPUs has no fixed memory"),
        ("--vllm-python=/nowhere", "there is no file /nowhere"),
    ],
)
def test_a_vllm_that_cannot_be_planned_is_refused(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([LLAMA, SHORT, "--device-memory=80GB", "--sampler=vllm", *flags.split()]) != 0
    assert message in capsys.readouterr().err


# Against running workers


class Runs:
    """One run of each role on a server, by plain REST."""

    def __init__(self, server: LiveServer) -> None:
        self.url, self._client = server.url, Client(server)
        session = self._client.post("create_session", {"sdk_version": "0"})["session_id"]
        self._ids: dict[str, str] = {}
        for number, role in enumerate(("policy", "critic", "reference")):
            lora = {"rank": 4, "train_unembed": False}
            body = {"session_id": session, "model_seq_id": number, "base_model": MODEL, "lora_config": lora}
            self._ids[role] = self._client.post("create_model", body | {"model_role": role})["model_id"]

    def work(self, role: str, path: str) -> None:
        loss, data = ("value_mse", VALUES) if role == "critic" else ("cross_entropy", DATA)
        body = {"model_id": self._ids[role], "data": data, "loss_fn": loss}
        assert self._client.post(path, body if path != "optim_step" else {"model_id": self._ids[role]})["metrics"]

    def sample(self) -> None:
        saved = {"model_id": self._ids["policy"], "sampling_session_seq_id": 3}
        sampler = self._client.post("save_weights_for_sampler", saved)["sampling_session_id"]
        assert self._client.post("sample", sample_body(sampler))["sequences"]

    def memory(self, name: str) -> dict[str, int]:
        """Returns what GET /workers reports of a group: of its first rank."""
        return httpx.get(f"{self.url}/api/v1/workers", headers={"X-API-Key": ALICE}).json()["groups"][name]


@pytest.mark.slow
def test_workers_report_the_planned_bytes(
    tiny_models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {
        "device": "cpu",
        "role_group": ["critic=single", "reference=single"],
        "shared_devices": "turns",
        "max_context_length": 64,
    }
    source, names = tiny_models["qwen3"], {"policy": MODEL, "critic": f"{MODEL} (critic)"}
    plan = planned(capsys, f"--base-model={MODEL}={source}", *flags_of(options), "--lora-rank=4")
    other = planned(capsys, f"--base-model={MODEL}={source}", *flags_of(options), "--lora-rank=5")
    names["reference"] = f"{MODEL} (reference)"
    with live_server({MODEL: source}, tmp_path, **options) as server:
        runs = Runs(server)
        for role in ("policy", "critic"):
            waiting, at_work = plan["groups"][names[role]]["waiting"], plan["groups"][names[role]]["phases"]
            for path in ("forward_backward", "optim_step"):
                runs.work(role, path)
            memory = runs.memory(names[role])
            assert memory["base_weights_on_device"] == waiting["weights"]
            assert memory["adapters_on_device"] == learned(waiting)
            for _ in range(2):
                runs.work(role, "forward_backward")
            assert runs.memory(names[role])["adapters_on_device"] == learned(at_work[f"{role} pass"])
            assert learned(other["groups"][names[role]]["waiting"]) != learned(waiting)
            runs.work(role, "optim_step")
        runs.work("reference", "forward")
        of_reference = plan["groups"][names["reference"]]["waiting"]
        assert runs.memory(names["reference"])["adapters_on_device"] == learned(of_reference) == of_reference["models"]
        # One group is on the device at a time; what a turn moves is as planned.
        assert runs.memory(MODEL)["base_weights_on_device"] == 0
        for role, path in (("policy", "forward"), ("critic", "forward"), ("reference", "forward")):
            runs.work(role, path)
        before = {role: moved(runs.memory(name)) for role, name in names.items()}
        for _ in range(2):
            for role in names:
                runs.work(role, "forward")
        after = {role: moved(runs.memory(name)) for role, name in names.items()}
    for role, name in names.items():
        cache = plan["groups"][name]["waiting"]["kv_cache"]  # nothing was sampled
        assert (after[role] - before[role]) / 2 == plan["moving"][name]["arriving"] - cache, role
        assert plan["moving"][name]["arriving"] != other["moving"][name]["arriving"]


@pytest.mark.full
@pytest.mark.timeout(400)
def test_ranks_under_layouts_report_the_planned_bytes(
    tiny_models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {
        "device": "cpu",
        "parallel": "tp=2",
        "role_group": ["critic+reference=fsdp=2"],
        "sampler_workers": 1,
        "kv_cache_bytes": "1MiB",
        "max_context_length": 64,
    }
    source, of_critics, sampler = tiny_models["qwen3"], f"{MODEL} (critic and reference)", f"{MODEL} (sampler 1)"
    groups = planned(capsys, f"--base-model={MODEL}={source}", *flags_of(options), "--lora-rank=4")["groups"]
    with live_server({MODEL: source}, tmp_path, **options) as server:
        runs = Runs(server)
        for role, path in (("policy", "forward_backward"), ("critic", "forward_backward")):
            runs.work(role, path)
            runs.work(role, "optim_step")
        runs.work("reference", "forward")
        runs.sample()
        for name in (MODEL, of_critics, sampler):
            memory, waiting = runs.memory(name), groups[name]["waiting"]
            assert memory["base_weights_on_device"] == waiting["weights"], name
            assert memory["adapters_on_device"] == learned(waiting), name
        assert 0 < runs.memory(sampler)["kv_cache"] <= groups[sampler]["waiting"]["kv_cache"] == 1 << 20
    weights = [groups[name]["waiting"]["weights"] for name in (MODEL, of_critics, sampler)]
    assert len(set(weights)) == 3, "each layout divides others"


def learned(planned: dict[str, int]) -> int:
    return planned["models"] + planned["gradients"] + planned["optimizer"]


def moved(memory: dict[str, int]) -> int:
    return memory["offload_moved_bytes"] + memory["adapters_moved_bytes"]


# Output


def test_the_text_shows_each_phase_of_each_device(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [LLAMA, SHORT, "--role-group=critic=single@cuda:0", "--role-group=reference=fsdp=2@cuda:1"]
    sampled = ["--sampler-workers=1", "--sampler-device=cuda:0", "--kv-cache-bytes=8GB", "--device-memory=80GB"]
    plan = planned(capsys, *flags, *sampled)
    assert main([*flags, *sampled]) == 1
    text = capsys.readouterr().out
    assert text.startswith("M (llama): 8.03 billion parameters; sequences of 8192 tokens\n")
    assert re.search(r"^M \(critic\) +single +cuda:0 +bfloat16 +critic pass, step$", text, re.MULTILINE)
    assert re.search(r"^M \(reference\) +fsdp=2 +cuda:1, cuda:2 +bfloat16 +reference scores$", text, re.MULTILINE)
    assert re.search(r"^M \(sampler 1\) +single +cuda:0 +bfloat16 +sampling$", text, re.MULTILINE)
    first, second = plan["devices"]
    assert first["ranks"] == {"M": 1, "M (critic)": 1, "M (sampler 1)": 1} and second["names"] == ["cuda:1", "cuda:2"]
    assert re.search(rf"^all at once +{first['needed'] / 1e9:.1f} GB$", text, re.MULTILINE)
    peak = plan["groups"]["M"]["phases"]["policy pass"]["total"]
    too_much = f"{(first['needed'] - plan['usable']) / 1e9:.1f} GB more than the 73.6 GB that may be used"
    assert f"{too_much}; most is that of M, {peak / 1e9:.1f} GB in its policy pass" in text
    remedy, turns = plan["remedies"]
    assert remedy.startswith("most of it is activations, ") and ": use --activations recompute, or lower" in remedy
    assert f"\n{remedy}\n{turns}\n" in text
    assert turns == "or let the groups take turns: --shared-devices turns"
    assert max(map(len, text.splitlines())) <= 160
    for group in plan["groups"].values():
        for each in (group["waiting"], *group["phases"].values()):
            assert each["total"] == sum(value for name, value in each.items() if name != "total")
    unnamed = [*flags, "--sampler-workers=1", "--sampler-device=cuda:3"]
    assert main(unnamed) == 0
    assert "1.1 GB are counted: name --kv-cache-bytes to both" in capsys.readouterr().out


def test_turns_show_what_is_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [LLAMA, SHORT, "--role-group=critic=single", "--role-group=reference=single", "--shared-devices=turns"]
    plan = planned(capsys, *flags, "--device-memory=80GB")
    assert plan["fits"] and plan["remedies"] == []
    assert main([*flags, "--device-memory=80GB"]) == 0
    text = capsys.readouterr().out
    moves = plan["moving"]["M (critic)"]
    row = r" +".join(f"{moves[name] / 1e9:.1f} GB" for name in ("arriving", "leaving", "first", "host", "pinned"))
    assert re.search(rf"^M \(critic\) +{row} +0 MB$", text, re.MULTILINE)
    assert "all at once" not in text
    assert main([LLAMA, SHORT, "--role-group=critic=single@cuda:1", "--shared-devices=turns"]) == 0
    assert "no two groups share a device: none moves" in capsys.readouterr().out


def test_the_document_shows_the_plan_of_its_example(capsys: pytest.CaptureFixture[str]) -> None:
    document = (ROOT / "docs" / "roles.md").read_text()
    names = {"policies": "M", "critics": "M (critic)", "references": "M (reference)"}
    flags = ["--role-group=critic=single", "--role-group=reference=single", "--kv-cache-bytes=8GB", SHORT]
    plan = planned(capsys, LLAMA, *flags, "--shared-devices=turns", "--device-memory=80GB")
    found = re.findall(r"^\| ([a-z ]+): (policies|critics|references) \|(.*)\|$", document, re.MULTILINE)
    assert len(found) == sum(len(group["phases"]) for group in plan["groups"].values())
    for phase, group, cells in found:
        each = plan["groups"][names[group]]["phases"][phase]
        parts = [value for name, value in each.items() if name not in ("buffers", "total")]
        shown = [f"{part / 1e9:.1f}" if part else "" for part in [*parts, each["total"]]]
        assert [cell.strip() for cell in cells.split("|")] == shown, (phase, group)
    together = planned(capsys, LLAMA, *flags, "--device-memory=80GB")
    needed = [f"{each['devices'][0]['needed'] / 1e9:.1f}" for each in (plan, together)]
    assert f"it needs {needed[0]} of the 73.6 that may be used, and {needed[1]} with `--shared-devices t" in document
    moves = plan["moving"]["M (critic)"]
    pinned, host = (sum(each[name] for each in plan["moving"].values()) / 1e9 for name in ("pinned", "host"))
    moved = f"critics move {moves['arriving'] / 1e9:.1f} GB in and {moves['leaving'] / 1e9:.1f} out"
    words = f"{moved}, and the three groups pin {pinned:.1f} GB for {host:.1f}."
    assert words in document.replace("\n  ", " ")


# Refusals


REFUSED = {
    "policies apart": ("--role-group policy=single", 2, "policies always run in the base model's own group"),
    "an unknown role": ("--role-group judge=single", 2, "unknown role 'judge': expected critic or reference"),
    "a role twice": ("--role-group critic=single --role-group critic=tp=2", 2, "critic already has a group"),
    "no layout": ("--role-group critic", 2, "role group 'critic' is not ROLES=LAYOUT[@DEVICE]"),
    "auto": ("--role-group critic=auto", 2, "only --parallel can be auto"),
    "an impossible layout": (
        "--role-group critic=tp=3",
        1,
        "--role-group: tp=3 does not divide 32 query heads of M; valid tp: 1, 2, 4, 8",
    ),
    "half of the devices": (
        "--parallel tp=2 --device cuda:0 --role-group critic=tp=2@cuda:1",
        1,
        "M (critic) takes cuda:1 to cuda:2, and M cuda:0 to cuda:1, which overlap in part",
    ),
    "samplers that gather": ("--sampler-workers 1 --sampler-parallel fsdp=2", 2, "sampler_parallel fsdp=2: fsdp ranks"),
    "samplers' layout": ("--sampler-workers 1 --sampler-parallel tp=3", 1, "--sampler-parallel: tp=3 does not divide"),
    "no samplers": ("--sampler-device cuda:1", 2, "sampler_device has no effect without sampler_workers"),
    "too many devices": ("--sampler-workers 3 --sampler-device cuda:1,cuda:2", 2, "names 2 devices for 3"),
    "a way to share": ("--shared-devices never", 2, "shared_devices is 'never': expected together or turns"),
    "a device": ("--role-group critic=single@gpu", 2, "is at gpu: expected auto, cpu, cuda"),
}


@pytest.mark.parametrize("reason", REFUSED)
@pytest.mark.parametrize("command", ["plan", "serve"])
def test_plan_refuses_what_serve_refuses(
    command: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, status, message = REFUSED[reason]
    of_serve = [f"--state-dir={tmp_path / 'state'}", "--port=0"] if command == "serve" else []
    assert command_line.main([command, LLAMA, *flags.split(), *of_serve]) == status
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == "" and not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        ("--role-group critic=single --parallel auto", 2, "--parallel auto plans the policies alone"),
        ("--role-group draft=single", 1, "M (draft): drafts need an algorithm to be planned"),
        ("--sampler-workers 1 --sampler-parallel auto", 2, "--sampler-parallel auto needs the memory of a device"),
        ("--sampler-workers 1 --train-only", 2, "--train-only says that sampling happens elsewhere"),
        ("--role-group critic=tp=2@cuda:1 --num-devices 2", 1, "--role-group: tp=2 is 2 ranks, but there is 1 device"),
        ("--role-group critic=single@cuda:2 --num-devices 2", 1, "M (critic) takes cuda:2, one for each rank of"),
        ("--sampler-workers 1 --sampler-device cuda:4 --num-devices 2", 1, "there is no cuda:4"),
        ("--device cuda:7 --num-devices 2", 1, "M takes cuda:7, but with --num-devices 2 there is no cuda:7"),
        ("--role-group critic=single --device-memory 80", 2, "give a unit, such as 80GB"),
        ("--host-adapter-bytes many", 2, "--host-adapter-bytes is 'many'"),
        ("--prefill-chunk-tokens -1", 2, "prefill_chunk_tokens is -1: expected at least 0"),
    ],
)
def test_plan_refuses_what_it_cannot_plan(
    flags: str, status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([LLAMA, *flags.split()]) == status
    assert message in capsys.readouterr().err


def test_models_run_by_transformers_have_no_plan_of_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert main([f"--base-model=M={tmp_path}", "--role-group=critic=single"]) == 0
    assert "M (gpt2) runs by transformers' modules" in capsys.readouterr().out


def test_groups_need_the_servers_packages() -> None:
    code = (
        "import sys; sys.modules['sqlalchemy'] = None; from trainhouse.server.cli.commands import main; "
        f"sys.exit(main(['plan', {LLAMA!r}, '--role-group=critic=single']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "needs the package sqlalchemy: pip install 'trainhouse[server]'" in done.stderr


def test_auto_chooses_the_layout_of_samplers(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--sampler-workers 1 --sampler-parallel auto --device-link nvlink --sampler-device cuda:1 --num-devices 5"
    memory = "--device-memory 12GB --kv-cache-bytes 1GiB --max-context-length 2048 --micro-batch-tokens 2048"
    main([LLAMA, *flags.split(), *memory.split()])
    text = capsys.readouterr().out
    assert re.search(r"^M \(sampler 1\) +tp=4 +cuda:1 to cuda:4 +bfloat16 +sampling$", text, re.MULTILINE)
