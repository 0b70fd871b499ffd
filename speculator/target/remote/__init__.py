"""Targets whose layers run in servers, for training."""
