"""Norms other than those of ../fused.py."""
