"""The frozen target model and its state."""
