"""Comparisons, a command each."""
