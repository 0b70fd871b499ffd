"""Optimisers that torch does not have."""
