"""The MLP speculator (arXiv 2404.19124)."""
