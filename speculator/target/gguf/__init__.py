"""Targets in GGUF files."""
