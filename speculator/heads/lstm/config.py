"""Config of the LSTM speculator."""

from speculator.heads.rnn import RNNConfig


class LSTMSpeculatorConfig(RNNConfig):
    """Shape of an `LSTMSpeculator`, whose weights are always tied."""

    model_type = "lstm_speculator"

    def activation_bytes(self, length: int) -> int:
        return 64 * self.n_predict * self.inner_dim

    def __post_init__(self, **kwargs):
        if not self.tie_weights:
            raise ValueError("tie_weights must be true: there is no untied LSTM head")
        super().__post_init__(**kwargs)
