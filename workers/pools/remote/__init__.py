"""Ranks that another process keeps."""
