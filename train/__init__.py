"""Training a speculator: the run's config, losses, the trainer, the stages."""
