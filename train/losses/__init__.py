"""The losses of a token, and their computation in chunks."""
