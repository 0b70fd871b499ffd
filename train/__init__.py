"""Training a speculator: the run's config, losses, the loop, the stages."""
