"""Encoder-decoder targets: the encoder, and positions of each row in the decoder."""
