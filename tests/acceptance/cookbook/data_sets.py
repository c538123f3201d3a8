"""Local files under the names of the recipes' data sets, which `load_dataset` prefers to the hub's.

Every question asks for a sum, which is 3 or 4.
"""

import json
from pathlib import Path
from typing import Any

QUESTION_SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
"""The math recipes add it to each question."""
SUMS = [(f"What is {left} plus {answer - left}?", answer) for answer in (3, 4) for left in range(8)]
CHATS_FILE = "chats.jsonl"

Row = dict[str, Any]


def write_data_sets(folder: Path) -> None:
    # Evaluation is by whole batches, of 128 in sl_basic.
    write_splits(folder / "HuggingFaceH4/no_robots", train=chats() * 32, test=chats() * 8)
    problems = [{"question": question, "answer": f"#### {answer}"} for question, answer in SUMS[::2]]
    write_splits(folder / "openai/gsm8k", train=problems, test=problems)
    (folder / "openai/gsm8k/README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n"
        "  - split: train\n    path: train.jsonl\n  - split: test\n    path: test.jsonl\n---\n"
    )
    write_splits(folder / "Anthropic/hh-rlhf", train=preferences() * 16, test=preferences())
    # The recipe holds 1024 of them out.
    write_splits(folder / "argilla/ultrafeedback-binarized-preferences", train=coin_flips() * 36)
    write_splits(folder / "zwhe99/DeepMath-103K", train=[{"question": question} for question, _ in SUMS] * 64)
    write_splits(folder / "open-thoughts/OpenThoughts3-1.2M", train=traces() * 32)
    write_splits(folder / "hicai-zju/SciKnowEval", test=multiple_choice() * 8)
    (folder / CHATS_FILE).write_text(lines_of(chats() * 8))


def chats() -> list[Row]:
    return [
        {
            "messages": [
                {"role": "user", "content": question + QUESTION_SUFFIX},
                {"role": "assistant", "content": f"\\boxed{{{answer}}}"},
            ]
        }
        for question, answer in SUMS
    ]


def preferences() -> list[Row]:
    """Every answer is preferred to the refusal."""
    texts = {"chosen": "The sum is {}.", "rejected": "I cannot add."}
    return [
        {key: f"\n\nHuman: {question}\n\nAssistant: {text.format(answer)}" for key, text in texts.items()}
        for question, answer in SUMS
    ]


def coin_flips() -> list[Row]:
    """Each of two answers is as often preferred as the other."""
    pairs = [("heads", "tails"), ("tails", "heads")]
    return [
        {"instruction": question, "chosen_response": chosen, "rejected_response": rejected}
        for question, _ in SUMS
        for chosen, rejected in pairs
    ]


def traces() -> list[Row]:
    return [
        {
            "conversations": [
                {"from": "human", "value": question},
                {"from": "gpt", "value": f"<think>\n{question}\n</think>\n\n{answer}"},
            ]
        }
        for question, answer in SUMS
    ]


def multiple_choice() -> list[Row]:
    common = {"choices": {"label": ["A", "B"], "text": ["3", "4"]}, "domain": "Chemistry", "details": {"level": "L3"}}
    return [
        {"question": question, "answerKey": "AB"[answer - 3], "type": "mcq-4-choices"} | common
        for question, answer in SUMS
    ]


def write_splits(directory: Path, **splits: list[Row]) -> None:
    directory.mkdir(parents=True)
    for name, rows in splits.items():
        (directory / f"{name}.jsonl").write_text(lines_of(rows))


def lines_of(rows: list[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
