"""MLP and LSTM draft heads, and weights from a folder, in vLLM, which calls `register` in each process at its start."""

ARCHITECTURES = {"EagleMLPSpeculator": "MLPHead", "EagleLSTMSpeculator": "LSTMHead"}
"""Classes of `speculator_vllm.model` by the architecture in config.json."""


def register() -> None:
    """Make the architectures and the weight transfer known to vLLM; may be called more than once."""
    from vllm import ModelRegistry
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name, model in ARCHITECTURES.items():
        if name not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(name, f"speculator_vllm.model:{model}")
    if "speculator_folder" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("speculator_folder", "speculator_vllm.weights", "FolderEngine")
