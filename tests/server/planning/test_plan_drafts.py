"""`trainhouse plan --draft`: its output, its refusals, and the table in docs/drafts.md that quotes it."""

import json
import re
from collections.abc import Iterator

import pytest

from .test_plan import CONFIGS, ROOT, main, printed, refused

DOCUMENT = (ROOT / "docs" / "drafts.md").read_text()
DRAFT = "eagle3,draft_vocab_size=32000"
OPTIONS = ("--device-memory=80GB", "--train-only")
DEVICES = {"Llama-3.1-8B": (1, 2), "Qwen3-30B-A3B": (1, 2), "Llama-3.1-70B": (2, 4, 8)}


def of_model(name: str) -> str:
    return f"--base-model={name}={CONFIGS / name}.json"


def test_the_planned_memory_of_a_draft_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    model, length = of_model("Llama-3.1-8B"), "--max-context-length=8192"
    layouts = ("--parallel=fsdp=8", "--draft-parallel=replicas=4,tp=2")
    plan = json.loads(printed(capsys, model, f"--draft={DRAFT}", *layouts, length, *OPTIONS, "--json"))
    memory, draft = plan["memory"], plan["memory"]["draft"]
    assert (plan["parallel"], plan["draft_parallel"], plan["ranks"]) == ("fsdp=8", "replicas=4,tp=2", 8)
    assert draft["masters"] == 2 * draft["weights"] // 4 == draft["gradients"] == draft["moments"] // 2
    assert draft["kept"] == draft["weights"] + draft["masters"] + draft["gradients"] + draft["moments"]
    assert memory["least"] == memory["target"] + memory["policy"] + memory["rotations"] + draft["kept"]
    assert memory["rotations"] == 8192 * 4 * (128 + 64)
    of_passes = memory["target_pass"], memory["exchange"], memory["head"] + memory["draft_pass"]["total"]
    assert memory["total"] == memory["least"] + max(*of_passes, memory["sampling"]) + draft["scratch"]
    assert plan["fits"] and plan["longest_sequence"] > 8192
    text = printed(capsys, model, f"--draft={DRAFT}", *layouts, length, *OPTIONS)
    assert f"\nat most at a time             {memory['total'] / 1e9:.1f} GB" in text
    assert "layout: fsdp=8 for the target, replicas=4,tp=2 for the draft, 8 ranks" in text
    assert f"the longest sequence that fits: {plan['longest_sequence']} tokens" in text


def test_a_group_of_drafts_is_planned_by_its_own_layout(capsys: pytest.CaptureFixture[str]) -> None:
    """The layout of the policies, and groups of other roles, change nothing. Control: another layout does."""

    def planned(*flags: str) -> dict[str, object]:
        of_draft = (f"--draft={DRAFT}", "--max-context-length=8192", "--device-memory=80GB", "--json")
        return json.loads(printed(capsys, of_model("Llama-3.1-8B"), *of_draft, *flags))

    alone = planned("--parallel=tp=2", "--draft-parallel=sp=2", "--train-only")
    group = ("--role-group=critic=single", "--role-group=draft=tp=2@cuda:1", "--draft-parallel=sp=2")
    assert planned(*group) == planned("--parallel=fsdp=4", *group) == alone
    assert planned("--role-group=draft=fsdp=2")["memory"] != alone["memory"]


def test_captured_features_are_sized_by_form(capsys: pytest.CaptureFixture[str]) -> None:
    def planned(draft: str, *flags: str) -> str:
        return printed(capsys, of_model("Llama-3.1-8B"), f"--draft={draft}", "--max-context-length=4096", *flags)

    def captured(draft: str, *flags: str) -> dict[str, int]:
        return json.loads(planned(draft, *flags, "--json"))["captured_bytes"]

    layers = 3 * 4096
    assert captured(f"{DRAFT},target_top_k=8") == {
        "hidden_state": 2 * (layers + 4096),
        "logits": 2 * (layers + 128256),
        "pruned_logits, 32000 tokens": 2 * (layers + 32000) + 8,
        "pruned_logits, top 8": 2 * (layers + 8) + 4 * 8 + 4,
    }
    assert captured("eagle3", "--dtype=float32")["hidden_state"] == 4 * (layers + 4096)
    assert captured("dflash,num_layers=2") == {"without the target's distribution": 2 * 2 * 4096}
    assert "\npruned_logits, top 64        24964\n" in planned(DRAFT)


def test_a_full_target_and_longer_unrolling_need_more(capsys: pytest.CaptureFixture[str]) -> None:
    def total(draft: str, *flags: str) -> int:
        length = "--max-context-length=4096"
        plan = printed(capsys, of_model("Llama-3.1-8B"), f"--draft={draft}", length, *flags, "--json")
        return json.loads(plan)["memory"]["total"]

    assert total(DRAFT) < total(f"{DRAFT},ttt_length=9") and total(DRAFT) < total("eagle3")
    # Weights in float32 and bfloat16.
    assert total(DRAFT, "--training=full") - total(DRAFT) == pytest.approx(6 * 8.03e9, rel=0.02)
    assert total("dflash") < total("dflash,num_layers=4") < total("dflash,num_layers=4,num_anchors=1024")


def test_stored_logits_count_where_ranks_exchange_them(capsys: pytest.CaptureFixture[str]) -> None:
    def exchanged(form: str, layout: str, draft: str) -> int:
        flags = (f"--draft={DRAFT},{form}", "--max-context-length=4096", f"--parallel={layout}")
        plan = printed(capsys, of_model("Llama-3.1-8B"), *flags, f"--draft-parallel={draft}", "--json")
        return json.loads(plan)["memory"]["exchange"]

    hidden, logits = (exchanged(f"target_repr={form}", "fsdp=2", "sp=2") for form in ("hidden_state", "logits"))
    assert logits == pytest.approx(4 * 4096 * 2 * 128256, rel=0.1) and logits > 5 * hidden
    assert exchanged("target_repr=pruned_logits", "fsdp=2", "sp=2") == pytest.approx(logits / 4, rel=0.2)
    assert exchanged("target_repr=logits", "sp=2", "sp=2") == exchanged("ttt_length=7", "sp=2", "sp=2")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ("--draft=eagle3,target_repr=hidden", 2, "--draft has target_repr 'hidden': expected hidden_state, logits, "),
        ("--draft=eagle3,target_repr=pruned_logits", 1, "pruned_logits needs draft_vocab_size or target_top_k"),
        ('--draft={"algorithm":"eagle3"}', 2, "write it without JSON, such as eagle3,draft_vocab_size=32000"),
        ("--draft=eagle3,ttt_length=4,ttt_length=3", 2, "--draft has ttt_length twice, '4' and '3': give it once"),
        ("--draft=medusa", 2, "--draft is 'medusa': expected eagle3 or dflash"),
        ("--draft=eagle3,num_anchors=4", 2, "--draft has no 'num_anchors' for eagle3: expected capture_layers, "),
        ("--draft=eagle3,ttt_length=0", 2, "--draft has ttt_length '0': expected a whole number from 1 to 16777216"),
        ("--draft-parallel=tp=2", 2, "--draft-parallel has no effect without --draft"),
        ("--draft=eagle3 --sampler-workers=1", 2, "for which --sampler-workers changes nothing: leave it out"),
        ("--draft=eagle3 --role-group=critic=single", 2, "no --role-group has them: add one, such as draft=tp=2"),
        ("--draft=eagle3 --role-group=critic+draft=tp=2", 2, "give drafts a group of their own, draft=tp=2"),
        ("--draft=eagle3 --role-group=draft=tp=3", 1, "tp=3 does not divide"),
        ("--draft=eagle3 --parallel=auto", 2, "--parallel auto needs the memory of a device"),
        ("--draft=eagle3,draft_vocab_size=200000", 1, "draft_vocab_size 200000 exceeds the vocabulary of M, 128256"),
        ("--draft=eagle3,target_top_k=200000", 1, "target_top_k is 200000, and M has 128256 tokens: lower it"),
        (
            f"--draft=eagle3,capture_layers={'+'.join(map(str, range(40)))}",
            1,
            "eagle3 captures 40 layers, and M has 32",
        ),
        ("--draft=eagle3 --parallel=fsdp=2 --draft-parallel=tp=4", 1, "this is 4 ranks, but the model has 2"),
        ("--draft=eagle3 --parallel=replicas=2 --draft-parallel=tp=2", 1, "use fsdp in place of replicas"),
    ],
)
def test_impossible_drafts_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: str, status: int, message: str
) -> None:
    model = f"--base-model=M={CONFIGS}/Llama-3.1-8B.json"
    assert message in refused(capsys, status, model, "--max-context-length=4096", *arguments.split())


@pytest.mark.slow
def test_the_table_in_the_document_matches_the_plans(capsys: pytest.CaptureFixture[str]) -> None:
    expected = list(rows(capsys))
    found = re.findall(r"^\| (?:Qwen3|Llama)\S* \|.*\|$", DOCUMENT, re.MULTILINE)
    assert found == expected, "\n" + "\n".join(expected)
    assert " ".join(f"{option} ".replace("=", " ", 1).strip() for option in (f"--draft={DRAFT}", *OPTIONS)) in " ".join(
        DOCUMENT.replace("\\\n", " ").split()
    )


def rows(capsys: pytest.CaptureFixture[str]) -> Iterator[str]:
    """Yields a row for each number of devices with which auto chooses otherwise."""
    for model, numbers in DEVICES.items():
        for kilotokens in (8, 16, 32):
            before = ""
            for number in numbers:
                found = cells(capsys, model, kilotokens, number)
                if found != before:
                    yield f"| {model} | {kilotokens}k | {number} | {found} |"
                before = found


def cells(capsys: pytest.CaptureFixture[str], model: str, kilotokens: int, number: int) -> str:
    flags = (f"--draft={DRAFT}", *OPTIONS, f"--max-context-length={kilotokens * 1024}")
    auto = ("--parallel=auto", "--device-link=nvlink")
    status = main([of_model(model), *flags, *auto, f"--num-devices={number}", "--json"])
    captured = capsys.readouterr()
    if status:
        pattern = r"devices: (\S+) with --draft-parallel (\S+) and --activations (\S+) needs least, .* rank, (.*):"
        ((target, draft, way, reason),) = re.findall(pattern, captured.err)
        layout = (f"--parallel={target}", f"--draft-parallel={draft}", f"--activations={way}")
        main([of_model(model), *flags, *layout, "--json"])
        plan, verdict = json.loads(capsys.readouterr().out), f"does not fit: {reason}"
    else:
        plan = json.loads(captured.out)
        verdict = f"{plan['longest_sequence']:,} tokens"
    memory = plan["memory"]
    parts = [
        memory["target"] + memory["policy"],
        memory["draft"]["kept"],
        memory["draft"]["scratch"],
        max(memory["target_pass"], memory["exchange"]),
        memory["draft_pass"]["total"] + memory["head"],
        memory["total"],
    ]
    shown = " | ".join(f"{part / 1e9:.1f}" for part in parts)
    return f"`{plan['parallel']}` | `{plan['draft_parallel']}` | {plan['load']['activations']} | {shown} | {verdict}"
