"""One forward pass over the KV cache: the tree of its tokens, where they are written, and what each of them sees."""
