"""Reads parts of packed weights from files, dequantized."""
