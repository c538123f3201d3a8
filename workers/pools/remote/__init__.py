"""Attaches to ranks that another process keeps."""
