"""Programs, one per file: the kinds of model over a base model, with what each scores, trains in addition to LoRA, and
takes as losses."""
