"""The frozen target model and its state.

base.py             what training needs of any target: hidden states, logits, matrices, tokenizer
in_process.py       a target in this process; loading.py, sharding.py and packed.py belong to it
model.py            `Target`: a target that decodes; at load it proves that it does so exactly, see probe.py
attention/ cache/   one forward pass over the KV cache: tree, tokens that it writes, masks; the storage
recurrent/          layers with a state in place of keys and values
encoder/ text.py    encoder-decoder models, and texts with their sources
gguf/ remote/       targets in GGUF files, and in servers
"""
