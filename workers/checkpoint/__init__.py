"""Writes a model into a directory and reads it back.

An adapter is stored as the files of PEFT, which `peft` loads unchanged:
adapter_model.safetensors, adapter_config.json
A fully trained model is stored as the files of Hugging Face, which transformers loads unchanged:
model.safetensors, or several and their index; config.json and the base model's other files, such as the tokenizer
Both have in addition:
trainhouse.json          format version, training configuration, base model, steps taken
optimizer.safetensors    AdamW's moments, if saved with the optimizer
window.safetensors       in snapshots: the gradients accumulated since the last step, if any
If several ranks write, the files are numbered, such as optimizer-00001-of-00004.safetensors. The weights are those
after the last optimizer step. Saving leaves gradients unchanged, and only snapshots contain them.
"""

from .reading import SavedModel, filled, is_snapshot, read_new_model, read_saved
from .saving import save
from .trained_state import TrainedState

__all__ = [
    "SavedModel",
    "TrainedState",
    "filled",
    "is_snapshot",
    "read_new_model",
    "read_saved",
    "save",
]
