"""The decoding engine: one step, and what it needs."""
