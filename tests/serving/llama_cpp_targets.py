"""Print the GGUF architectures and model types of targets that give a draft head hidden states, as JSON.

`sources` is the folder of llama.cpp's sources: graphs in src/models set t_layer_inp, and the converter writes files for
those graphs. PYTHONPATH has them and their gguf-py.
"""

import json
import re
import sys
from pathlib import Path

import gguf
from conversion import ModelBase, ModelType, load_all_models
from transformers.models.auto import modeling_auto

sources = Path(sys.argv[1])
header = (sources / "src/models/models.h").read_text()
structs = dict(re.findall(r"^struct (llama_model_\w+)\s*(: public .*?)^\};", header, re.S | re.M))
setters: set[str] = set()
for file in (sources / "src/models").glob("*.cpp"):
    if "res->t_layer_inp[" in (code := file.read_text()):
        setters |= set(re.findall(r"(llama_model_\w+?)(?:<\w+>)?::graph", code))


def gives(model: str) -> bool:
    """Whether the model's graph, which may be another model's, sets t_layer_inp."""
    body = structs.get(model, "")
    other = re.search(r"using graph = (\w+)", body) or re.match(r": public (\w+)", body)
    return model in setters or ("struct graph " not in body and other is not None and gives(other[1]))


names = dict(re.findall(r'(LLM_ARCH_\w+),\s*"([^"]+)"', (sources / "src/llama-arch.cpp").read_text()))
cases = re.findall(
    r"((?:case LLM_ARCH_\w+:\s*)+)return new (\w+)\(params\)", (sources / "src/llama-model.cpp").read_text()
)
files = {names[arch] for archs, model in cases if gives(model) for arch in re.findall(r"LLM_ARCH_\w+", archs)}

load_all_models()
converted = {
    name: gguf.MODEL_ARCH_NAMES[made.model_arch] for name, made in ModelBase._model_classes[ModelType.TEXT].items()
}
types = {
    kind
    for mapping in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
    for kind, classes in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").items()
    if any(converted.get(name) in files for name in ([classes] if isinstance(classes, str) else classes))
}
print(json.dumps({"files": sorted(files), "types": sorted(types)}))
