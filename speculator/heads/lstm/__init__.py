"""The LSTM speculator of Arctic."""
