"""Measuring: acceptance, speed, the report and its plots."""
