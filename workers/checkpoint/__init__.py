"""A model in a directory and back.

Of an adapter, PEFT's files, which `peft` loads as they are:
adapter_model.safetensors, adapter_config.json
Of a model with weights of its own, those of Hugging Face, which transformers loads as they are:
model.safetensors, or several and their index; config.json and what else lies with the base model's, such as a tokenizer
Of both, beside them:
trainhouse.json          format version, what is trained, base, steps taken
optimizer.safetensors    AdamW's moments, where the optimizer was asked for
window.safetensors       in snapshots: the gradients accumulated since the last step, if any
Of a draft:
model.safetensors        or several and their index, by the names of published drafts of its algorithm, which engines
                         read; with the tokens that it can say, d2t and t2d, where these are not all of the target's
target/                  in snapshots: what it guesses, if that is not the bare base model
Where several ranks write, each of these has a number, such as optimizer-00001-of-00004.safetensors. The weights are
those of the last step. Saving disturbs no gradients, and but for snapshots saves none.
"""

from .learned import Learned
from .reading import Saved, is_snapshot, read_draft, read_new, read_saved, target_in
from .saving import save

__all__ = ["Learned", "Saved", "is_snapshot", "read_draft", "read_new", "read_saved", "save", "target_in"]
