"""The block drafter DSpark (arXiv 2607.05147), and DFlash (2602.06036), which is one without a Markov head."""
