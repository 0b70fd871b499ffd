"""Measure acceptance, speed and losslessness; write reports."""
