"""MLP and LSTM draft heads in vLLM, which calls `register` in each of its processes when it starts."""

ARCHITECTURES = {"EagleMLPSpeculator": "MLPHead", "EagleLSTMSpeculator": "LSTMHead"}


def register() -> None:
    """Make the two architectures known to vLLM; may be called more than once."""
    from vllm import ModelRegistry

    for name, model in ARCHITECTURES.items():
        if name not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(name, f"speculator_vllm.model:{model}")
