"""What a run is told: its settings, their loader, and the flags of other commands."""
