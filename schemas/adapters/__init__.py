"""The files of adapters, as trainhouse, peft, tinker-cookbook and vLLM have them, and their merge into base models."""
