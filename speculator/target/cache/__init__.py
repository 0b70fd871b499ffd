"""Storage of keys and values, of self attention and of cross attention."""
