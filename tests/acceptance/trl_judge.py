"""Reference for full fine-tuning: the same steps by TRL's SFTTrainer, in its own process and environment.

PYTHON trl_judge.py MODEL EXERCISE OUTPUT: PYTHON has TRL and none of our packages, MODEL is a Hugging Face directory,
EXERCISE a file that `ten_steps.judged_steps` writes. Writes OUTPUT/losses.json, a number for each step, and the weights
to OUTPUT/model.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

MICRO_BATCH = 2
"""Rows of a forward, padded to the longer one; larger steps accumulate gradients."""
NO_TARGET = -100


def main(model_directory: str, exercise_file: str, output: Path) -> None:
    exercise = json.loads(Path(exercise_file).read_text())
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**(config(exercise["batches"], output) | exercise["changes"])),
        train_dataset=Dataset.from_list([row(each) for batch in exercise["batches"] for each in batch]),
        processing_class=padding(),
        # Trainer's default excludes the norms from weight decay.
        optimizers=(adamw(model, exercise["adam"]), None),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == len(exercise["batches"]), f"{len(losses)} steps of {len(exercise['batches'])}"
    (output / "losses.json").write_text(json.dumps(losses))
    model.save_pretrained(output / "model")


def config(batches: list[list[Any]], output: Path) -> dict[str, Any]:
    """Turns off everything that differs from plain AdamW on the mean over a step's targets."""
    (rows_of_a_step,) = {len(batch) for batch in batches}
    assert rows_of_a_step % MICRO_BATCH == 0, f"{rows_of_a_step} rows in a step: use a multiple of {MICRO_BATCH}"
    return {
        "output_dir": str(output),
        "per_device_train_batch_size": MICRO_BATCH,
        "gradient_accumulation_steps": rows_of_a_step // MICRO_BATCH,
        "num_train_epochs": 1,
        "train_sampling_strategy": "sequential",
        "max_length": None,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "router_aux_loss_coef": 0.0,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def row(sequence: dict[str, list[int]]) -> dict[str, list[int]]:
    """Labels are at their own tokens: the trainer shifts them."""
    tokens, weights = sequence["tokens"], sequence["weights"]
    labels = [token if weight else NO_TARGET for token, weight in zip(tokens, [0, *weights], strict=True)]
    return {"input_ids": tokens, "labels": labels}


def padding() -> PreTrainedTokenizerFast:
    """Returns a tokenizer that only pads; there are no texts."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0})), pad_token="<pad>")


def adamw(model: PreTrainedModel, adam: dict[str, float]) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        model.parameters(),
        lr=adam["learning_rate"],
        betas=(adam["beta1"], adam["beta2"]),
        eps=adam["eps"],
        weight_decay=adam["weight_decay"],
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
