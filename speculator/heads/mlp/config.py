"""Config of the MLP speculator."""

from speculator.heads.rnn import RNNConfig


class MLPSpeculatorConfig(RNNConfig):
    """Shape of an `MLPSpeculator`.

    With `tie_weights` all steps share one embedding, norm and output matrix; steps 1 and up share one projection.
    """

    model_type = "mlp_speculator"
