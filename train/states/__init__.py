"""Batches of rows, and where the target's hidden states come from: this process, servers or files."""
