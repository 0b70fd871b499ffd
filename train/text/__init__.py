"""The rows of a run, and the text that the target writes for it."""
