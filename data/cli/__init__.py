"""Commands of `python -m data`, one file each."""
