"""Print {model type: whether a class that vLLM has for it gives a draft head hidden states}, as JSON.

Classes that can't be imported here are left out; some need torchvision.
"""

import json
from contextlib import suppress

from transformers.models.auto import modeling_auto
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.model_executor.models.registry import ModelRegistry

found: dict[str, bool] = {}
for names in (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
):
    for kind, classes in names.items():
        for name in [classes] if isinstance(classes, str) else classes:
            if name in ModelRegistry.models:
                with suppress(Exception):
                    gives = supports_eagle3(ModelRegistry.models[name].load_model_cls())
                    found[kind] = found.get(kind, False) or gives
print(json.dumps(found))
