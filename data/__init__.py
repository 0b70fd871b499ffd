"""Turn text into rows of tokens: sources, rendering, packing, generation."""
