"""MLP draft heads, and weights from a folder, in vLLM, which calls `register` in each process at its start."""

ARCHITECTURES = {"EagleMLPSpeculator": "MLPHead"}
"""Classes of `speculator_vllm.model` by the architecture in config.json."""


def register() -> None:
    """Make the architectures and the weight transfer known to vLLM; may be called more than once.

    A vLLM without such weight transfers gets the architectures alone, with a warning.
    """
    from vllm import ModelRegistry
    from vllm.logger import init_logger

    for name, model in ARCHITECTURES.items():
        if name not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(name, f"speculator_vllm.model:{model}")
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        if "speculator_folder" not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine("speculator_folder", "speculator_vllm.weights", "FolderEngine")
    except (ImportError, AttributeError) as error:
        init_logger(__name__).warning("no weight transfer 'speculator_folder' in this vLLM: %s", error)
