"""What is decided, checked and planned before a run begins."""
