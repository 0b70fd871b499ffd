"""The commands of `python -m data`, one file each."""
