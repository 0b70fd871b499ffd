"""The attention head EAGLE-3 (arXiv 2503.01840)."""
