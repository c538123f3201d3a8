"""`trainhouse plan`: its output, its refusals, and the tables in docs/parallel.md that quote it."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from trainhouse.server.cli import commands
from trainhouse.workers.shapes.other_models import left_out_of

from ...workers.lineup import LINEUP

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = ROOT / "tests" / "workers" / "configs"
DOCUMENT = (ROOT / "docs" / "parallel.md").read_text()


def main(arguments: Sequence[str]) -> int:
    return commands.main(["plan", *arguments])


def planned(capsys: pytest.CaptureFixture[str], model: str, *arguments: str, fits: bool = True) -> dict[str, Any]:
    status = main([f"--base-model={model}={CONFIGS / model}.json", *arguments, "--json"])
    assert status == (0 if fits else 1)
    return json.loads(capsys.readouterr().out)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(arguments)
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], status: int, *arguments: str) -> str:
    assert main(arguments) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_plan_is_a_command_of_trainhouse(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["--help"]) == 0
    assert re.search(r"^ +plan +Estimate the memory per rank", capsys.readouterr().out, re.MULTILINE)


def test_the_command_line_imports_no_heavy_packages() -> None:
    """Importing these packages takes seconds."""
    code = "import sys, trainhouse.server.__main__; print([name for name in sys.modules if name in sys.argv])"
    parts = ["torch", "transformers", "numpy", "huggingface_hub", "fastapi", "pydantic", "rich", "httpx"]
    done = subprocess.run([sys.executable, "-c", code, *parts], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_planned_memory_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, "Qwen3-30B-A3B", "--parallel=fsdp=2,ep=4,tp=2", "--max-context-length=4096")
    memory = plan["memory"]
    assert memory["base"] == sum(each["bytes"] for each in plan["parameters"])
    assert memory["total"] == memory["base"] + memory["learned"]["total"] + memory["kv_cache"] + memory["work"]
    (experts,) = (each for each in plan["parameters"] if each["pattern"].endswith("experts.gate_up_proj"))
    assert experts["shape"] == [128, 2 * 768, 2048] and experts["own_shape"] == [32, 768, 2048]
    assert (experts["count"], experts["fsdp"]) == (48, 2)
    assert experts["bytes"] == 2 * 48 * 32 * 768 * 2048 // 2
    assert plan["ranks"] == 16 and plan["fits"] is None
    for name, value in plan["load"].items():  # the defaults of serve
        assert (name, value) in {
            ("longest", 4096), ("dtype", "bfloat16"), ("on_cpu", False), ("micro_batch_tokens", 4096),
            ("head_chunk_tokens", 512),
            ("lora_rank", 32), ("adapter_slots", 1), ("kv_cache_bytes", 1 << 30), ("tp_activations", "sharded"),
            ("zero_stage", "3"), ("activations", "keep"), ("samples", True), ("full_slots", 2), ("training", "lora"),
                ("base_quantization", "none"), ("optimizer_states", "float32"),
        }  # fmt: skip


def test_the_text_output_has_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    layout = "fsdp=2,sp=4,tp=2"
    arguments = (f"--parallel={layout}", "--max-context-length=4096", "--device-memory=80GB", "--num-devices=40")
    plan = planned(capsys, "Llama-3.1-8B", *arguments, "--adapter-slots=3")
    text = printed(capsys, f"--base-model=Llama-3.1-8B={CONFIGS}/Llama-3.1-8B.json", *arguments, "--adapter-slots=3")
    lines = text.splitlines()
    assert lines[0].startswith("Llama-3.1-8B (llama): 8.03 billion parameters in bfloat16; 32 layers, 32 query and 8")
    assert lines[1] == "context: 4096 tokens of the 131072 that the model has (RoPE scaling llama3 by 8 from 8192)"
    assert lines[2] == "layout: fsdp=2,sp=4,tp=2, 16 ranks"
    assert all(cell in text for cell in ("model.layers.*.mlp.down_proj.weight", "4096 x 7168", "rowwise", "1/8"))
    total, spare = (
        f"{value / 1e9:.1f} GB" for value in (plan["memory"]["total"], plan["usable"] - plan["memory"]["total"])
    )
    assert re.search(rf"^at most at a time +{total}$", text, re.MULTILINE)
    assert f"fits 80.0 GB, of which 6.4 GB are left to CUDA and fragmentation: {spare} to spare" in text
    assert (
        lines[-1]
        == f"with 32 of the 40 devices: {plan['filling']}"
        == f"with 32 of the 40 devices: replicas=2,{layout}"
    )
    assert max(map(len, lines)) <= 140


def test_states_of_a_hybrid_model_are_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LINEUP["Qwen3.5-4B"]))
    arguments = (f"--base-model=M={file}", "--max-context-length=4096")
    convolution, states = 2 * 3 * (2 * 16 + 32) * 128, 4 * 32 * 128 * 128
    assert json.loads(printed(capsys, *arguments, "--json"))["memory"]["state_bytes_per_sequence"] == 24 * (
        convolution + states
    )
    assert re.search(r"tokens, less the states of each sequence, 52 MB$", printed(capsys, *arguments), re.MULTILINE)
    plain = printed(capsys, f"--base-model=M={CONFIGS}/Llama-3.1-8B.json", "--max-context-length=4096")
    assert "states" not in plain


def test_planned_memory_grows_with_the_requested_adapter_slots(capsys: pytest.CaptureFixture[str]) -> None:
    """Slots are filled as runs are created, so the default plans one, not all 64."""
    model = "Llama-3.1-8B"
    arguments = ("--max-context-length=4096", "--lora-rank=8", "--device-memory=80GB")
    one, two, ten = (
        planned(capsys, model, *arguments, *slots)["memory"]
        for slots in ((), ("--adapter-slots=2",), ("--adapter-slots=10",))
    )
    assert ten["learned"]["total"] == 5 * two["learned"]["total"] and ten["total"] > two["total"] > one["total"]
    assert one["least"] == one["base"] + one["learned"]["total"] < one["total"]
    text = printed(capsys, f"--base-model={model}={CONFIGS / model}.json", *arguments)
    assert re.search(rf"^at least, between passes +{one['least'] / 1e9:.1f} GB ", text, re.MULTILINE)
    (more,) = re.findall(r"enough for (\d+) more adapters of that rank", text)
    assert planned(capsys, model, *arguments, f"--adapter-slots={int(more) * 3 // 4}")["fits"]
    assert not planned(capsys, model, *arguments, f"--adapter-slots={int(more) + 2}", fits=False)["fits"]


def test_the_suggested_remedies_make_it_fit(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--device-memory=40GB", "--max-context-length=65536")
    plan = planned(capsys, "Llama-3.1-8B", *arguments, fits=False)
    assert plan["remedies"]
    for remedy in plan["remedies"]:
        assert planned(capsys, "Llama-3.1-8B", *arguments, *remedy.split())["fits"]
    sharded = ("--device-memory=60GB", "--max-context-length=512", "--parallel=fsdp=8", "--micro-batch-tokens=512")
    plan = planned(capsys, "Llama-3.1-70B", *sharded, "--adapter-slots=1", fits=False)
    assert "--train-only" in plan["remedies"]
    assert planned(capsys, "Llama-3.1-70B", *sharded, "--adapter-slots=1", "--train-only")["memory"]["kv_cache"] == 0


def test_auto_explains_its_choice(capsys: pytest.CaptureFixture[str]) -> None:
    model = f"--base-model=M={CONFIGS}/Qwen3-30B-A3B.json"
    options = ("--parallel=auto", "--device-memory=80GB", "--adapter-slots=1", "--max-context-length=32768")
    link = "--device-link=nvlink"
    text = printed(capsys, model, *options, link, "--num-devices=64")
    assert "layout: sp=2,tp=4, 8 ranks" in text
    assert re.search(r"fewer ranks do not fit: sp=\d,tp=\d would need \d+\.\d GB on each", text)
    assert "with 64 of the 64 devices: replicas=8,sp=2,tp=4" in text
    training = printed(capsys, model, *options, link, "--train-only")
    assert "layout: sp=4,tp=2, 8 ranks" in training
    *_, shown = training.partition("serve makes micro-batches")
    assert f"\nserve makes micro-batches{shown}```\n" in DOCUMENT
    found = json.loads(printed(capsys, model, *options, link, "--train-only", "--json"))
    assert found["products"] == {"flops_per_second": 400e12, "source": "assumed"}
    assert "no effect without --parallel auto" in refused(capsys, 2, model, link)
    assert "--device-name has no effect without --device-memory" in refused(capsys, 2, model, "--device-name=A100")
    assert "H10 is not one of A100" in refused(capsys, 2, model, *options, "--device-name=H10")
    assert "recomputed" not in text
    less = printed(capsys, model, *options, "--num-devices=2")
    assert "layout: tp=2, 2 ranks\nlayers are recomputed in the backward pass: --activations recompute\n" in less
    too_few = (*options, "--num-devices=1", "--device-memory=40GB")
    pattern = r"fits on 1 devices: single with --activations offload needs least, \d+\.\d GB on each rank \(base "
    assert re.search(pattern, refused(capsys, 1, model, *too_few))
    assert "single with --activations keep needs" in refused(capsys, 1, model, *too_few, "--activations=keep")
    assert "give --device-memory, such as 80GB" in refused(capsys, 2, model, "--parallel=auto")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--parallel=tp=2", "--base-model is not given"),
        ("--base-model=M= --parallel=tp=2", "base model 'M=' is not NAME[=PATH_OR_HUB_ID]"),
        ("--device-memory=80XB", "--device-memory is '80XB': expected a number of bytes, such as 268435456 or 256MiB"),
        ("--num-devices=0", "num_devices is 0: expected at least 1"),
        ("--lora-rank=many", "--lora-rank is 'many': expected an integer"),
        ("--tp-activations=some", "tp_activations is 'some': expected sharded or whole"),
        ("--activations=none", "activations is 'none': expected keep or recompute or offload"),
        ("--device-memory=80", "--device-memory is 80 bytes: give a unit, such as 80GB"),
        ("--training=some", "training is 'some': expected lora or full"),
        (
            "--training=full --lora-rank=8",
            "--lora-rank configures adapters, which --training full has none of: leave it",
        ),
        ("--training=full --adapter-slots=1", "--adapter-slots configures adapters, which --training full has none of"),
        ("--full-slots=1", "--full-slots configures full models, which --training lora has none of"),
        ("--zero-stage=2 --parallel=tp=2", "--zero-stage 2 has no effect without fsdp, and the layout is tp=2"),
        ("--base-model=M=m --base-model=N=n", "--base-model is given twice: one model is planned at a time"),
        ("--parallel=tp=two", "--parallel: tp=two is not a number of ranks; give one such as tp=2"),
    ],
)
def test_invalid_values_are_refused(capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    model = (
        [] if "base-model" in arguments or "not given" in message else [f"--base-model=M={CONFIGS}/Llama-3.1-8B.json"]
    )
    assert message in refused(capsys, 2, *model, *arguments.split())


def test_json_output_has_the_reason_when_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (f"--base-model=M={CONFIGS}/Llama-3.1-8B.json", "--parallel=tp=3", "--json")
    assert main(arguments) == 1
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] is False and "tp=3 does not divide 32 query heads of M" in plan["error"]


def test_the_remedy_names_the_largest_consumer(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [f"--base-model=M={CONFIGS}/Llama-3.1-8B.json", "--parallel=auto", "--device-memory=2GB"]
    few = ["--adapter-slots=1", "--lora-rank=8", "--kv-cache-bytes=8GiB"]
    assert "): lower --kv-cache-bytes" in refused(capsys, 1, *arguments, *few)
    assert ", or take more devices" in refused(capsys, 1, *arguments, *few, "--num-devices=8")


def test_full_fine_tuning_counts_weights_gradients_and_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--training=full", "--max-context-length=4096", "--device-memory=80GB", "--train-only")
    plan = planned(capsys, "Llama-3.1-8B", "--parallel=tp=8", "--full-slots=1", *arguments)
    kept = sum(each["bytes"] for each in plan["parameters"]) // 2
    names = ("weights", "gradients", "optimizer", "copies", "total")
    assert [plan["memory"]["learned"][name] / kept for name in names] == [4, 8, 8, 2, 22]
    twice = planned(capsys, "Llama-3.1-8B", "--parallel=tp=8", *arguments, fits=False)
    assert twice["memory"]["learned"]["total"] == 2 * plan["memory"]["learned"]["total"]
    assert "--full-slots 1" in twice["remedies"]
    for remedy in twice["remedies"]:
        given = [each for each in arguments if each.split("=")[0] not in remedy]
        assert planned(capsys, "Llama-3.1-8B", "--parallel=tp=8", *given, *remedy.split())["fits"]


def test_auto_finds_a_layout_for_full_fine_tuning(capsys: pytest.CaptureFixture[str]) -> None:
    model = f"--base-model=M={CONFIGS}/Llama-3.1-8B.json"
    options = (
        "--training=full",
        "--parallel=auto",
        "--device-memory=80GB",
        "--max-context-length=4096",
        "--train-only",
    )
    text = printed(capsys, model, *options, "--full-slots=1")
    assert "layout: fsdp=2,sp=2, 4 ranks" in text
    assert re.search(r"^1 model of 2\.01 billion weights, 22 bytes each +44\.2 GB", text, re.MULTILINE)
    assert re.search(
        r"^the output head gathered +3\.7 GB +with its gradient, while it computes logits", text, re.MULTILINE
    )
    assert re.search(r"fewer ranks do not fit: \S+ would need \d+\.\d GB on each", text)
    sharded = printed(capsys, model, *options[:1], *options[2:], "--parallel=fsdp=8")
    assert re.search(r"^its gradients +1\.7 GB +and another layer's, being reduced$", sharded, re.MULTILINE)
    message = refused(capsys, 1, model, *options, "--num-devices=2", "--full-slots=1")
    assert "models' own weights" in message and "): use larger devices, or take more devices" in message


def test_models_run_by_transformers_have_no_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    message = printed(capsys, f"--base-model=M={tmp_path}", "--parallel=replicas=2")
    words = "M (gpt2) runs by transformers' modules, on one rank or on replicas, and its memory is not planned"
    assert message == f"{words}; docs/models.md lists the types for which it is\n"
    assert json.loads(printed(capsys, f"--base-model=M={tmp_path}", "--json"))["fits"] is None
    message = refused(capsys, 1, f"--base-model=M={tmp_path}", "--parallel=auto", "--device-memory=80GB")
    assert f"--parallel auto: {words}" in message and len(message) < 250
    (tmp_path / "config.json").write_text("{")
    assert "config.json is not JSON" in refused(capsys, 1, f"--base-model=M={tmp_path}")


@pytest.mark.parametrize("options", [(), ("--draft=eagle3",), ("--device=cuda:0",)])
def test_the_plan_of_a_model_with_images_says_that_only_text_is_served(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = json.loads((CONFIGS / "Qwen3-30B-A3B.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl_moe", "text_config": text}))
    arguments = (f"--base-model=M={tmp_path}", "--max-context-length=4096", *options)
    words = "of qwen3_vl_moe models only the part for text is loaded: requests with images or sound are refused"
    assert words == left_out_of("qwen3_vl_moe")
    assert f"\n{words}\n" in printed(capsys, *arguments)
    assert words in json.loads(printed(capsys, *arguments, "--json"))["notes"]
    plain = (f"--base-model=M={CONFIGS}/Qwen3-30B-A3B.json", *arguments[1:])
    assert "only the part for text" not in printed(capsys, *plain) + printed(capsys, *plain, "--json")


def test_the_plan_says_in_which_dtype_it_counts(capsys: pytest.CaptureFixture[str]) -> None:
    """A group on a CPU is counted as serve loads it."""
    arguments = (f"--base-model=M={CONFIGS}/Llama-3.1-8B.json", "--max-context-length=4096")
    (usual, *_), named, drafts = (
        json.loads(printed(capsys, *arguments, *more, "--json"))["notes"]
        for more in ((), ("--dtype=float32",), ("--draft=eagle3",))
    )
    assert drafts == [usual] and named == []
    assert usual.startswith("counted in bfloat16") and "on a CPU it uses float32: add --dtype float32" in usual
    assert f"\n{usual}\n" in printed(capsys, *arguments)
    for options, dtype in (("--device=cpu", "float32"), ("--device=cpu --dtype=bfloat16", "bfloat16")):
        assert re.search(rf"^M +single +cpu +{dtype} ", printed(capsys, *arguments, *options.split()), re.MULTILINE)


# The document

OPTIONS = ("--lora-rank=32", "--kv-cache-bytes=4GB", "--device-memory=80GB")
FULL_OPTIONS = (
    "--training=full",
    "--full-slots=1",
    "--train-only",
    "--device-memory=80GB",
    "--max-context-length=8192",
)


def rows(capsys: pytest.CaptureFixture[str]) -> Iterator[str]:
    """Yields the rows of the table in docs/parallel.md: model, adapter slots, longest sequence and number of nodes."""
    wanted = [
        ("Qwen3-30B-A3B", 4, (16, 32), (1, 2, 4, 8)),
        ("Qwen3-30B-A3B-YaRN", 4, (64,), (1, 2, 4, 8)),
        ("Llama-3.1-8B", 4, (8, 16, 32), (1, 2)),
        ("Llama-3.1-70B", 4, (8, 16, 32, 64), (1, 2, 4, 8)),
    ]
    for model, slots, lengths, numbers in wanted:
        for length in lengths:
            for nodes in numbers:
                yield row(capsys, model, slots, length, nodes)


def full_rows(capsys: pytest.CaptureFixture[str]) -> Iterator[str]:
    """Yields the rows of the table for full fine-tuning."""
    for model, numbers in (("Llama-3.1-8B", (1, 2)), ("Qwen3-30B-A3B", (1, 2, 4)), ("Llama-3.1-70B", (4, 8))):
        for nodes in numbers:
            yield f"| all of {model} | {nodes} | {chosen_cells(capsys, model, nodes, FULL_OPTIONS)}"


def row(capsys: pytest.CaptureFixture[str], model: str, slots: int, kilotokens: int, nodes: int) -> str:
    options = (*OPTIONS, f"--adapter-slots={slots}", f"--max-context-length={kilotokens * 1024}")
    return f"| {model} | {kilotokens}k | {slots} | {nodes} | {chosen_cells(capsys, model, nodes, options)}"


def chosen_cells(capsys: pytest.CaptureFixture[str], model: str, nodes: int, options: tuple[str, ...]) -> str:
    """Returns the cells for the layout that auto chooses, in GB."""
    arguments = (*options, f"--num-devices={8 * nodes}")
    auto = ("--parallel=auto", "--device-link=nvlink", "--json")
    status = main([f"--base-model=M={CONFIGS / model}.json", *auto, *arguments])
    captured = capsys.readouterr()
    if status == 0:
        chosen = json.loads(captured.out)
        layout, way = chosen["filling"] or chosen["parallel"], chosen["load"]["activations"]
    else:
        ((layout, way),) = re.findall(r"devices: (\S+) with --activations (\S+) needs least", captured.err)
    plan = planned(capsys, model, f"--parallel={layout}", f"--activations={way}", *arguments, fits=status == 0)
    memory = plan["memory"]
    parts = [memory["base"], memory["learned"]["total"], memory["activations"]["total"], memory["total"]]
    shown = " | ".join(f"{part / 1e9:.1f}" for part in parts)
    verdict = "fits" if plan["fits"] else "does not fit"
    return f"`{layout}` | {way} | {shown} | {verdict} |"


@pytest.mark.slow
def test_the_tables_in_the_document_match_the_plans(capsys: pytest.CaptureFixture[str]) -> None:
    expected = list(rows(capsys))
    found = re.findall(r"^\| (?:Qwen3|Llama)\S* \|.*\|$", DOCUMENT, re.MULTILINE)
    assert found == expected, "\n" + "\n".join(expected)
    expected = list(full_rows(capsys))
    found = re.findall(r"^\| all of .*\|$", DOCUMENT, re.MULTILINE)
    assert found == expected, "\n" + "\n".join(expected)


def test_the_document_plans_what_exceeds_a_node(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The plans that it compares with a pipeline."""
    config = json.loads((CONFIGS / "Llama-3.1-70B.json").read_text())
    sizes = {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128, "num_hidden_layers": 126}
    dense, sparse = tmp_path / "405B.json", tmp_path / "DeepSeek-V3.1.json"
    dense.write_text(json.dumps(config | sizes))
    sparse.write_text(json.dumps(LINEUP["DeepSeek-V3.1"]))
    options = ("--train-only", "--device-memory=80GB", "--json")
    for layout, nodes in (("tp=8", 1), ("fsdp=2,tp=8", 2), ("fsdp=4,tp=8", 4)):
        flags = (f"--parallel={layout}", "--activations=recompute", "--max-context-length=4096")
        plan = json.loads(printed(capsys, f"--base-model=M={dense}", *flags, *options))
        memory = plan["memory"]
        parts = [memory["base"], memory["learned"]["total"], memory["activations"]["total"], memory["total"]]
        shown = " | ".join(f"{part / 1e9:.1f}" for part in parts)
        verdict = "fits" if plan["fits"] else "does not fit"
        assert f"\n| `{layout}` | {nodes} | {shown} | {verdict} |\n" in DOCUMENT
    longer = ("--parallel=fsdp=4,tp=8", "--activations=recompute", "--max-context-length=8192")
    memory = json.loads(printed(capsys, f"--base-model=M={dense}", *longer, *options))["memory"]
    assert f"8,192 tokens: {memory['activations']['total'] / 1e9:.1f} GB of 405B, recomputed" in DOCUMENT
    flags = ("--parallel=auto", "--device-link=nvlink", "--num-devices=32", "--max-context-length=8192")
    plan = json.loads(printed(capsys, f"--base-model=M={sparse}", *flags, *options))
    assert plan["load"]["activations"] == "recompute"
    shown = f"`{plan['parallel']}` with recomputed layers, {plan['memory']['total'] / 1e9:.1f} GB on each rank"
    assert shown in DOCUMENT


def test_the_document_names_every_flag() -> None:
    for option in (*OPTIONS, *FULL_OPTIONS):
        assert option.replace("=", " ", 1) in DOCUMENT


def test_weights_as_released_are_planned_with_their_bytes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "Qwen3-30B-A3B.json").read_text())
    released = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": released}))
    file, flag = f"--base-model=M={tmp_path / 'config.json'}", "--base-quantization=released"
    plain, packed = (json.loads(printed(capsys, file, "--json", *flags))["memory"] for flags in ((), (flag,)))
    experts, of_gate_and_up = 48 * 128 * 3 * 2048 * 768, 128 * 2 * 768 * 2048
    assert plain["base"] - packed["base"] == experts * (16 - 4.25) / 8
    assert plain["dequantized"] == 0 and packed["dequantized"] == 2 * of_gate_and_up
    assert "the largest packed weight" in printed(capsys, file, flag)
    reason = "M has no weights that can be held as released, because its config.json has no quantization_config"
    assert reason in refused(capsys, 1, f"--base-model=M={CONFIGS / 'Qwen3-30B-A3B.json'}", flag)
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": gptq}))
    message = refused(capsys, 1, file, flag)
    assert "because its weights are packed by gptq in 4 bits, and only codes with one scale for each block" in message
    assert "leave it out, by which they are dequantized, or hold them in 4 bits with --base-quantization nf4" in message
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": released}))
    assert "fsdp cannot gather the weights" in refused(capsys, 1, file, flag, "--parallel=fsdp=2")
