"""A target in vLLM 0.32: training gets the states of the target here, and an exported head's counters are read."""
