"""Text into token rows: sources, packing, the prepared-row cache."""
