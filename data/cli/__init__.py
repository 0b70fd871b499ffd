"""Commands of `speculator data`, one file each."""
