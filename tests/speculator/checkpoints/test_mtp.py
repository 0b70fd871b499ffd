"""MTP layers in a model's folder: read, written back under the names that servers read, and restored."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_folders import edit
from huggingface_hub.utils import filter_repo_objects
from mtp_models import config_of, head_of, hub_tensors, model_of, mtp_of, save, write_shards
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.integrations import finegrained_fp8
from transformers.modeling_layers import MtpModel

from speculator import Chain, Engine, HeadDrafter, Target
from speculator.__main__ import main
from speculator.checkpoints import config_of as read_settings
from speculator.checkpoints import fp8, layout_of, load_any
from speculator.checkpoints import save as save_head
from speculator.checkpoints.loading import load_head
from speculator.checkpoints.mtp import Stored
from speculator.errors import UserError
from tests.speculator.heads.test_eagle3_drafting import Noted

PROMPT = [5, 9, 33, 2, 17]
PATTERNS = {"glm4_moe": r"^model\.layers\.{}\.", "deepseek_v3": r"^model\.layers\.{}\."}


def folder_of(tmp_path: Path, family: str, layers: int = 2, mtp_layers: int = 1, hidden_size: int | None = None, **how):
    """A model's folder with MTP layers, and both parts of it."""
    config = config_of(family, layers, mtp_layers)
    if hidden_size:
        config.hidden_size = hidden_size
    config.get_text_config().vocab_size = 300
    model = model_of(config)
    mtp = mtp_of(model, mtp_layers)
    return save(tmp_path / family, model, mtp, **how), model, mtp


def tuned(folder: Path):
    """A head as after training on that folder's model."""
    head = load_any(folder)
    torch.manual_seed(3)
    for weight in head.parameters():
        weight.data += torch.randn_like(weight) * 0.05
    return head


def export(tmp_path: Path, head, base: Path, name: str = "out") -> Path:
    if not (tmp_path / "head").exists():
        save_head(head, tmp_path / "head", layout_of("native", head))
    flags = ["--speculator", str(tmp_path / "head"), "--format", "mtp", "--base_model", str(base)]
    assert main(["export", *flags, "--output", str(tmp_path / name)]) == 0
    return tmp_path / name


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        made |= load_file(file)
    return made


@pytest.mark.parametrize(
    ("family", "experts", "shards"),
    [
        *(("glm4_moe", "loose", 3), ("qwen3_5_moe", "fused", 2), ("qwen3_5_moe", "loose", 1), ("mellum", "loose", 1)),
        *((family, "loose", 1) for family in ("hy_v3", "exaone_moe", "glm_ocr", "bailing_hybrid")),
        *(pytest.param(family, "loose", 1, marks=pytest.mark.soak) for family in ("qwen3_next", "glm4_moe_lite")),
    ],
)
def test_mtp_layers_are_read_and_exported_in_the_form_of_their_folder(
    tmp_path, family, experts, shards, capsys, monkeypatch
):
    folder, model, mtp = folder_of(tmp_path, family, experts=experts, shards=shards, dtype=torch.bfloat16)
    target = Target(model, tokenizer=None)
    hidden, tokens = torch.randn(1, 4, 32), torch.arange(6)[None]
    read, made = load_any(folder).float(), head_of(target, mtp)
    assert read_settings(folder).to_dict() == read.config.to_dict()
    for weight in made.parameters():
        weight.data = weight.bfloat16().float()
    matrix = torch.randn(300, 32)
    # Weights that are not rounded to bfloat16 alike would give a hundred times that.
    torch.testing.assert_close(
        read.logits(hidden, tokens, matrix), made.logits(hidden, tokens, matrix), rtol=0, atol=1e-4
    )

    (folder / "README.md").write_text("about the model")
    least = min(file.stat().st_size for file in folder.glob("*.safetensors"))
    monkeypatch.setattr("speculator.checkpoints.mtp._LARGE", least)
    save_head(tuned(folder), tmp_path / "head", layout_of("native", tuned(folder)))
    (tmp_path / "head" / "README.md").write_text("about the head")
    out = export(tmp_path, None, folder)
    assert (folder / "README.md").read_text() == "about the model"
    before, after = tensors_of(folder), tensors_of(out)
    assert [(name, x.dtype, x.shape) for name, x in after.items()] == [(n, x.dtype, x.shape) for n, x in before.items()]
    own = set(hub_tensors(model, mtp, experts))
    # The block's tensors are named as those of the model's own layer of that kind, which transformers has written.
    kind = 0 if family == "exaone_moe" else 1
    layer = {name.split(f"layers.{kind}.")[1] for name in before if re.search(rf"model\.layers\.{kind}\.", name)}
    assert layer or family == "glm_ocr"
    assert experts == "fused" or not layer - {re.sub(r".*layers\.\d+\.", "", name) for name in own}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in own if not name.endswith(("correction_bias", "expert_bias"))}
    # Only shards with MTP layers are written; other shards are linked, and small files, which people edit, copied.
    index = "model.safetensors.index.json"
    for file in folder.iterdir():
        holds = file.suffix == ".safetensors" and bool(own & set(load_file(file)))
        linked = file.stat().st_ino == (out / file.name).stat().st_ino
        assert linked is (not holds and file.stat().st_size >= least), file.name
    assert shards == 1 or (out / index).read_bytes() == (folder / index).read_bytes()
    # The same again, from the written folder: nothing changes.
    again = export(tmp_path, None, out, "again")
    for file in out.iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes()
    capsys.readouterr()
    assert main(["inspect", str(out)]) == 0
    assert f"of {model.config.get_text_config().model_type}" in capsys.readouterr().out


def drafts_of_transformers(model, monkeypatch) -> tuple[list[int], dict[tuple[int, ...], list[int]]]:
    """The text of `generate(use_mtp=True)`, and its drafts by the text before them."""
    drafts: list[list[int]] = []
    texts: list[tuple[int, ...]] = []
    own, candidates = MtpModel.forward, MTPCandidateGenerator.get_candidates

    def noted(self, *given, **more):
        made = own(self, *given, **more)
        drafts.append(made[0][0].tolist())
        return made

    def proposed(self, input_ids, *given, **more):
        count = len(drafts)
        made = candidates(self, input_ids, *given, **more)
        texts.extend([tuple(input_ids[0].tolist())] * (len(drafts) - count))  # none before the prompt is read
        return made

    monkeypatch.setattr(MtpModel, "forward", noted)
    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", proposed)
    text = model.generate(
        torch.tensor([PROMPT]), use_mtp=True, do_sample=False, max_new_tokens=24, pad_token_id=0, eos_token_id=None
    )
    monkeypatch.undo()
    return text[0].tolist(), dict(zip(texts, drafts, strict=True))


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("deepseek_v3", 3),
        ("mellum", 2),
        ("glm4_moe", 2),
        *(pytest.param(*sizes, marks=pytest.mark.soak) for sizes in (("glm4_moe", 46), ("deepseek_v3", 61))),
    ],
)
def test_a_tuned_layer_written_back_drafts_in_transformers_what_it_drafts_here(tmp_path, family, layers, monkeypatch):
    folder, *_ = folder_of(tmp_path, family, layers)
    out = export(tmp_path, tuned(folder), folder)
    model = AutoModelForCausalLM.from_pretrained(out, experts_implementation="eager")
    if layers not in (46, 61) and family in PATTERNS:  # transformers knows the MTP layers of the published sizes
        model._keys_to_ignore_on_load_unexpected = [PATTERNS[family].format(layers)]
    text, theirs = drafts_of_transformers(model, monkeypatch)
    target = Target.load(str(out))
    drafter = Noted(load_head(out, target), Chain(1))
    made = Engine(target, drafter, slots=1).generate([PROMPT], max_new_tokens=24).tokens[0]
    assert text == PROMPT + made
    ours: dict = {}
    for text, _, logits in drafter.log:
        ours.setdefault(text, []).append(logits.argmax().item())
    common = theirs.keys() & ours.keys()
    assert len(common) > 8
    assert {text: theirs[text] for text in common} == {text: ours[text] for text in common}


def quantised(folder: Path, own, scheme: str, config: dict) -> dict[str, dict]:
    """Quantise the matrices of an MTP layer in a folder; blocks are 16 x 16, which divides no matrix.

    Return all tensors, and what the matrices are after dequantisation.
    """
    tensors = tensors_of(folder)
    for name in own:
        if tensors[name].ndim != 2 or "eh_proj" in name or "mlp.gate." in name:
            tensors[name] = tensors[name].bfloat16()
            continue
        rows, columns = tensors[name].shape
        suffix, shape = {
            "blocks": ("_scale_inv", (-(-rows // 16), -(-columns // 16))),
            "powers": ("_scale_inv", (-(-rows // 16), -(-columns // 16))),
            "compressed blocks": ("_scale", (-(-rows // 16), -(-columns // 16))),
            "rows": ("_scale", (rows, 1)),
            "tensor": ("_scale", ()),
        }[scheme]
        scale = torch.rand(shape) / 1000 + 1e-4
        if scheme == "powers":
            scale = scale.log2().round().exp2().to(torch.float8_e8m0fnu)
        whole = scale.float()
        if "blocks" in scheme or scheme == "powers":
            whole = torch.stack([whole[i // 16] for i in range(rows)])
            whole = torch.stack([whole[:, i // 16] for i in range(columns)], 1)
        tensors[name] = (tensors[name] / whole).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[name + suffix] = scale
        tensors[name + "-by hand"] = (tensors[name].float() * whole).bfloat16()
    by_hand = {name.removesuffix("-by hand"): tensors.pop(name) for name in list(tensors) if name.endswith("-by hand")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder, lambda content: content.update(quantization_config=config))
    return {"tensors": tensors, "by hand": by_hand}


SCHEMES = {
    "blocks": {"quant_method": "fp8", "weight_block_size": [16, 16]},
    "powers": {"quant_method": "fp8", "weight_block_size": [16, 16], "scale_fmt": "ue8m0"},
    "compressed blocks": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"strategy": "block", "block_structure": [16, 16]}}},
    },
    "rows": {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"strategy": "channel"}}}},
    "tensor": {"quant_method": "modelopt"},
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quantised_layer_is_dequantised_and_quantised_again(tmp_path, scheme):
    folder, model, mtp = folder_of(tmp_path, "glm4_moe", hidden_size=40)
    made = quantised(folder, hub_tensors(model, mtp), scheme, SCHEMES[scheme])
    tensors, name = made["tensors"], "model.layers.2.self_attn.q_proj.weight"
    head = load_any(folder)
    assert torch.equal(head.layers[0].block.self_attn.q_proj.weight, made["by hand"][name])
    assert len(made["by hand"]) > 6

    # Numbers that were not trained stay as they were; trained ones get the scales of their blocks.
    (tmp_path / "as_it_was").mkdir()
    same = tensors_of(export(tmp_path / "as_it_was", head, folder))
    assert {n: (x.dtype, x.float().tolist()) for n, x in same.items()} == {
        n: (x.dtype, x.float().tolist()) for n, x in tensors.items()
    }

    head = tuned(folder)
    out = export(tmp_path, head, folder)
    again, written = load_any(out), tensors_of(out)
    assert {n: (x.dtype, x.shape) for n, x in written.items()} == {n: (x.dtype, x.shape) for n, x in tensors.items()}
    scale = next(n for n in tensors if n.startswith(name) and n != name)
    assert not torch.equal(written[scale].float(), tensors[scale].float())
    for one, other in zip(head.parameters(), again.parameters(), strict=True):
        assert (one - other).abs().max() <= 0.07 * one.abs().max()
    # The same head again, and what was read back: nothing changes.
    (tmp_path / "read_back").mkdir()
    for twice in (export(tmp_path, None, out, "twice"), export(tmp_path / "read_back", again, out)):
        assert (twice / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def test_only_what_has_a_scale_may_differ_by_half_a_step(tmp_path, monkeypatch):
    folder, model, mtp = folder_of(tmp_path, "glm4_moe", hidden_size=40)
    quantised(folder, hub_tensors(model, mtp), "blocks", SCHEMES["blocks"])

    def damaging(tensors, file, metadata):
        tensors["model.layers.2.enorm.weight"] = tensors["model.layers.2.enorm.weight"] * 1.02
        save_file(tensors, file, metadata=metadata)

    monkeypatch.setattr("speculator.checkpoints.mtp.save_file", damaging)
    head = tuned(folder)
    head.config.base_model_name_or_path = str(folder)
    with pytest.raises(UserError, match="the written layers differ in"):
        save_head(head, tmp_path / "out", layout_of("mtp", head))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, name: tensors.update({name: tensors[name].view(torch.uint8)}), "uint8"),
        (lambda tensors, name: tensors.pop(name + "_scale_inv"), "float8_e4m3fn without a scale"),
        (lambda tensors, name: tensors.update({name + "_scale_inv": torch.ones(2, 2)}), "has scales [2, 2]"),
        (lambda tensors, name: tensors.update({name + "_scale_inv": torch.ones(3, 3, dtype=torch.uint8)}), "uint8"),
    ],
)
def test_an_unknown_scheme_of_scales_is_refused(tmp_path, capsys, change, message):
    folder, model, mtp = folder_of(tmp_path, "glm4_moe", hidden_size=40)
    tensors = quantised(folder, hub_tensors(model, mtp), "blocks", SCHEMES["blocks"])["tensors"]
    change(tensors, "model.layers.2.self_attn.q_proj.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    capsys.readouterr()
    assert main(["inspect", str(folder)]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_the_stated_size_of_blocks_decides_where_a_last_block_is_cut(tmp_path):
    """The scales of 576 rows in blocks of 128 are 5: all but the last block have 128 rows, not 116."""
    sizes = fp8.sizes_of("kv_a_proj", torch.Size([576, 256]), torch.ones(5, 2), (128, 128))
    tensor, scale = torch.ones(576, 256), torch.arange(10.0).view(5, 2) + 1
    made = fp8.dequantise(tensor, scale, sizes)
    assert [made[row, 0].item() for row in (0, 127, 128, 511, 512, 575)] == [1, 1, 3, 7, 9, 9]
    assert torch.equal(made[:, 128], made[:, 0] + 1)
    tensor[512] = 448 * 50
    numbers, scales = fp8.quantise(tensor, scale, sizes, torch.float8_e4m3fn, powers=False)
    assert scales[4].tolist() == [50, 50]
    assert numbers[511, 0] == 448
    # transformers' own dequantisation of whole blocks, read from another file
    whole = numbers[:512], scales[:4]
    if dequantise := getattr(finegrained_fp8, "_dequantize_fp8_weight", None):  # not in transformers 5.17
        theirs = dequantise(*whole, [128, 128], torch.float32)
        assert torch.equal(fp8.dequantise(*whole, (128, 128)), theirs.bfloat16())


def test_a_layer_with_options_is_read_back_with_them_and_named_for_each_program_that_has_others(tmp_path, capsys):
    folder, *_ = folder_of(tmp_path, "glm4_moe")
    head = tuned(folder)
    head.config.zero_first, head.config.recycle_normed = True, False
    out = export(tmp_path, head, folder)
    said = {line.split(":")[0]: line for line in capsys.readouterr().out.splitlines() if "unlike this head" in line}
    assert said.keys() == {"not tried in SGLang 0.5.23", "loads in transformers 5.23"}  # vLLM has these for this family
    assert all("zero_first false, recycle_normed true, unlike" in line for line in said.values())
    again = load_any(out).config
    assert (again.zero_first, again.recycle_normed) == (True, False)
    assert main(["inspect", str(out)]) == 0
    assert "zero_first, recycles the state before the norm" in capsys.readouterr().out
    # A head with the defaults takes the place of that one.
    save_head(tuned(folder), tmp_path / "plain", layout_of("native", head))
    flags = ["--speculator", str(tmp_path / "plain"), "--format", "mtp", "--base_model", str(out)]
    assert main(["export", *flags, "--output", str(tmp_path / "again")]) == 0
    assert read_settings(tmp_path / "again").recycle_normed


@pytest.mark.parametrize(("family", "shards"), [("glm4_moe", 1), ("qwen3_5", 3)])
def test_the_layer_that_a_fine_tune_lost_is_restored_from_its_base_model(tmp_path, family, shards, capsys):
    base, model, mtp = folder_of(tmp_path, family, shards=shards)
    lost = tmp_path / "lost"
    shutil.copytree(base, lost)
    for file in lost.glob("model*"):
        file.unlink()
    own = set(hub_tensors(model, mtp))
    left = {name: x for name, x in tensors_of(base).items() if name not in own}
    write_shards(lost, left, shards)
    with pytest.raises(UserError, match="promises 1 MTP layers, and its files hold 0"):
        load_any(lost)
    flags = ["--speculator", str(base), "--format", "mtp", "--base_model", str(lost)]
    assert main(["export", *flags, "--output", str(tmp_path / "whole")]) == 0
    restored = tensors_of(tmp_path / "whole")
    assert restored.keys() == tensors_of(base).keys()
    assert all(torch.equal(x, restored[name]) for name, x in tensors_of(base).items())
    assert Target.load(str(tmp_path / "whole")).hidden_size == 32
    if shards > 1:
        index = json.loads((tmp_path / "whole" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in restored.values())
        assert set(index["weight_map"]) == set(restored)


def test_heads_of_other_models_are_refused(tmp_path):
    folder, *_ = folder_of(tmp_path, "glm4_moe")
    other, *_ = folder_of(tmp_path, "mellum")
    head = tuned(folder)
    target = Target.load(str(folder))
    for base, changes, why in (
        (other, {}, "layers are of glm4_moe"),
        (folder, {"base_model_fingerprint": target.fingerprint.replace(":", ":1234")[:-4]}, "other weights"),
        (folder, {"draft_vocab_size": 20}, "draft vocabulary"),
        (None, {}, "--base_model"),
        (tmp_path, {}, "not the folder of a model"),
    ):
        before = {name: getattr(head.config, name) for name in changes}
        head.config.base_model_name_or_path = base and str(base)
        for name, value in changes.items():
            setattr(head.config, name, value)
        with pytest.raises(UserError, match=why):
            save_head(head, tmp_path / "out", layout_of("mtp", head))
        for name, value in before.items():
            setattr(head.config, name, value)
        assert not (tmp_path / "out").exists()
    head.config.base_model_name_or_path, head.config.base_model_fingerprint = str(folder), target.fingerprint
    save_head(head, tmp_path / "out", layout_of("mtp", head))


def test_folders_without_a_layer_fail_in_one_line(tmp_path):
    folder, *_ = folder_of(tmp_path, "qwen3_5")
    tensors = tensors_of(folder)
    for change, why in (
        (
            {name: x for name, x in tensors.items() if name != "mtp.layers.0.mlp.up_proj.weight"},
            "lacks mtp.layers.0.mlp.up",
        ),
        ({**tensors, "mtp.fc.weight": torch.zeros(32, 32)}, r"mtp.fc.weight is \[32, 32\]"),
    ):
        save_file(change, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UserError, match=why):
            load_any(folder)
    os.truncate(folder / "model.safetensors", 100)
    with pytest.raises(UserError, match="damaged"):
        load_any(folder)
    (folder / "model.safetensors").unlink()
    write_shards(folder, tensors, 2)
    for shard in folder.glob("*.safetensors"):
        os.truncate(shard, 100)
    with pytest.raises(UserError, match=r"of-00002\.safetensors: damaged"):
        load_any(folder)


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("glm4_moe", 2),
        ("deepseek_v3", 3),
        ("glm_ocr", 2),
        *(pytest.param(family, 2, marks=pytest.mark.soak) for family in ("hy_v3", "bailing_hybrid", "exaone_moe")),
    ],
)
def test_models_of_any_depth_with_mtp_layers_are_targets(tmp_path, family, layers):
    """transformers ignores the MTP layers of the published depths only."""
    folder, *_ = folder_of(tmp_path, family, layers)
    target = Target.load(str(folder))
    head = load_head(folder, target)
    made = Engine(target, HeadDrafter(head)).generate([PROMPT], max_new_tokens=8).tokens
    assert made == Engine(target, None).generate([PROMPT], max_new_tokens=8).tokens
    tensors = tensors_of(folder)
    save_file({**tensors, f"model.layers.{layers + 1}.x": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"files hold model\.layers"):
        Target.load(str(folder))


def test_several_mtp_layers_are_refused(tmp_path):
    folder, *_ = folder_of(tmp_path, "glm4_moe", mtp_layers=2)
    with pytest.raises(UserError, match="its files hold 2 MTP layers; a chain of layers is not supported"):
        load_any(folder)


def test_an_output_inside_the_copied_folder_is_refused(tmp_path, capsys):
    folder, _, _ = folder_of(tmp_path, "glm4_moe")
    head = tuned(folder)
    save_head(head, tmp_path / "head", layout_of("native", head))
    flags = ["--speculator", str(tmp_path / "head"), "--format", "mtp", "--base_model", str(folder)]
    before = sorted(folder.rglob("*"))
    assert main(["export", *flags, "--output", str(folder / "out")]) == 2
    assert "inside" in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before


def test_the_files_decide_the_dtype_of_written_layers(tmp_path, capsys):
    folder, _, _ = folder_of(tmp_path, "glm4_moe")
    head = tuned(folder)
    save_head(head, tmp_path / "head", layout_of("native", head))
    flags = ["--speculator", str(tmp_path / "head"), "--format", "mtp", "--base_model", str(folder)]
    assert main(["export", *flags, "--output", str(tmp_path / "out"), "--dtype", "float16"]) == 2
    assert "--dtype" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_only_the_shards_that_a_head_is_read_from_are_downloaded(tmp_path, monkeypatch):
    folder, *_ = folder_of(tmp_path, "glm4_moe")
    tensors, index = tensors_of(folder), {}
    for shard, own in (("model-1.safetensors", True), ("model-2.safetensors", False)):
        part = {name: x for name, x in tensors.items() if bool(re.match(r"model\.(layers\.[01]\.|norm)", name)) is own}
        save_file(part, folder / shard, metadata={"format": "pt"})
        index |= dict.fromkeys(part, shard)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "pytorch_model.bin").write_bytes(b"of the same model")
    cache = tmp_path / "cache"
    cache.mkdir()

    def download(name, revision, **patterns):
        for file in filter_repo_objects([file.name for file in folder.iterdir()], **patterns):
            shutil.copy(folder / file, cache)
        return str(cache)

    monkeypatch.setattr("speculator.checkpoints.hub.snapshot_download", download)
    local, head = load_any(folder), load_any("org/model")
    assert {file.name for file in cache.glob("*model*")} == {"model-2.safetensors", "model.safetensors.index.json"}
    assert all(torch.equal(head.state_dict()[name], x) for name, x in local.state_dict().items())
    with pytest.raises(UserError, match=r"the shard model-1\.safetensors is missing"):  # a model is written whole
        save_head(head, tmp_path / "out", layout_of("mtp", head))
    assert Stored(cache).fingerprint == Stored(folder).fingerprint
    head.config.base_model_name_or_path = "org/model"
    save_head(head, tmp_path / "out", layout_of("mtp", head))
    assert "pytorch_model.bin" not in {file.name for file in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize("name", ["../victim/w.safetensors", "..", "a/b.safetensors", "/{victim}"])
def test_an_index_names_no_file_outside_its_folder(tmp_path, capsys, name):
    """A downloaded model's index comes from strangers, and shards are rewritten by its names."""
    folder, _, _ = folder_of(tmp_path, "glm4_moe", shards=2)
    save_head(tuned(folder), tmp_path / "head", layout_of("native", load_any(folder)))
    victim = tmp_path / "victim" / "w.safetensors"
    victim.parent.mkdir()
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    shard = index["weight_map"]["model.layers.2.eh_proj.weight"]
    shutil.copy(folder / shard, victim)
    before, name = victim.read_bytes(), name.format(victim=victim)
    index["weight_map"] = {key: name if each == shard else each for key, each in index["weight_map"].items()}
    file.write_text(json.dumps(index))
    capsys.readouterr()
    flags = ["--speculator", str(tmp_path / "head"), "--format", "mtp", "--base_model", str(folder)]
    assert main(["export", *flags, "--output", str(tmp_path / "out")]) == 2
    assert "not the name of a file in its folder" in capsys.readouterr().err
    assert victim.read_bytes() == before
