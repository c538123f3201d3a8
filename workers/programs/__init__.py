"""The kinds of model over the trunk, one a file: what each scores, learns beside LoRA and is trained by."""
