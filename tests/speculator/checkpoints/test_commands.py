import json
import os
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from conftest import tiny_block_head, tiny_head, tiny_mtp_head
from safetensors.torch import load_file, save_file
from transformers import T5Config, ViTConfig

from speculator import MLPSpeculator, MLPSpeculatorConfig, Target
from speculator.__main__ import main
from speculator.checkpoints import layout_of, layouts, save
from speculator.heads import ARCHITECTURES


def head_folder(folder, base, **changes):
    """A trained head's folder."""
    torch.manual_seed(0)
    shape = {"vocab_size": 300, "emb_dim": 32, "inner_dim": 16, "n_predict": 3, **changes}
    recorded = {"base_model_name_or_path": base and str(base), "trained_length": 256, "training_data": ["a", "b"]}
    head = MLPSpeculator(MLPSpeculatorConfig(**shape, **recorded))
    save(head, folder, layout_of("native", head))
    return folder


@pytest.fixture
def head(tmp_path, target_folder):
    return head_folder(tmp_path / "head", target_folder)


def export(head, output, *flags, layout="ibm"):
    return main(["export", "--speculator", str(head), "--format", layout, "--output", str(output), *flags])


def refused(capsys, code) -> str:
    shown = capsys.readouterr()
    assert code == 2
    assert shown.err.count("\n") == 1
    assert not shown.out
    return shown.err


def test_export_lists_the_servers(head, tmp_path, target_folder, capsys):
    output = tmp_path / "ibm"
    assert export(head, output) == 0
    shown = capsys.readouterr().out
    assert f"base model: {target_folder}" in shown
    assert (
        f"by its source, loads in vLLM 0.5.1 to 0.9.2 (V0 engine): vllm serve {target_folder} --speculative-config"
        in shown
    )
    assert f'"model": "{output}", "num_speculative_tokens": 3' in shown
    assert "DOES NOT LOAD in vLLM 0.10 to 0.32" in shown
    assert "DOES NOT LOAD in vLLM 0.33" in shown
    assert f"loads in TGI: text-generation-launcher --model-id {output} --speculate 3" in shown


def test_a_base_model_that_was_not_checked_is_reported(tmp_path, capsys):
    folder = head_folder(tmp_path / "head", None)
    assert export(folder, tmp_path / "none") == 0
    shown = capsys.readouterr().out
    assert "base model: none recorded" in shown
    assert "DOES NOT LOAD in TGI" in shown
    assert export(folder, tmp_path / "named", "--base_model", "some/base") == 0
    shown = capsys.readouterr().out
    assert "some/base, not on this machine" in shown
    assert "loads in TGI" in shown
    assert json.loads((tmp_path / "named" / "config.json").read_text())["base_model_name_or_path"] == "some/base"


def test_a_copied_card_names_the_new_base_model(head, tmp_path, target_folder):
    text = "---\nlicense: mit\nbase_model: old/base\ntags:\n- x\n---\n\n# Mine\n\nnaïve\n"
    (head / "README.md").write_text(text, encoding="utf-8")
    assert export(head, tmp_path / "same") == 0
    assert (tmp_path / "same" / "README.md").read_text(encoding="utf-8") == text
    text = text.replace("license: mit\n", "")
    assert export(head, tmp_path / "other", "--base_model", "new/base") == 0
    assert (tmp_path / "other" / "README.md").read_text(encoding="utf-8") == text.replace("old/base", "new/base")
    assert export(head, tmp_path / "here", "--base_model", str(target_folder)) == 0
    copied = (tmp_path / "here" / "README.md").read_text(encoding="utf-8")
    assert copied == text.replace("base_model: old/base\n", "")  # a folder is not a repository
    (head / "README.md").write_text("---\na: b: c\n---\n# a damaged header\n")
    assert export(head, tmp_path / "damaged", "--base_model", "new/base") == 0
    assert "a: b: c" in (tmp_path / "damaged" / "README.md").read_text()
    (head / "README.md").write_text("# no header\n")
    assert export(head, tmp_path / "bare", "--base_model", "new/base") == 0
    assert (tmp_path / "bare" / "README.md").read_text() == "---\nbase_model: new/base\n---\n# no header\n"


def test_a_folder_of_the_recorded_base_does_not_replace_its_hub_id(tmp_path, target_folder, capsys):
    about = {"base_model_fingerprint": Target.load(target_folder).fingerprint}
    folder = head_folder(tmp_path / "head", "org/base", **about)
    (folder / "README.md").write_text("---\nbase_model: org/base\n---\n")
    assert export(folder, tmp_path / "same", "--base_model", str(target_folder), layout="vllm-plugin") == 0
    shown = capsys.readouterr().out
    assert "org/base" in shown
    assert "base_model: org/base" in (tmp_path / "same" / "README.md").read_text()
    written = json.loads((tmp_path / "same" / "config.json").read_text())
    assert written["base_model_name_or_path"] == "org/base"
    other = head_folder(tmp_path / "other", "org/base", base_model_fingerprint="another:0000")
    assert export(other, tmp_path / "changed", "--base_model", str(target_folder)) == 0
    written = json.loads((tmp_path / "changed" / "config.json").read_text())
    assert written["base_model_name_or_path"] == str(target_folder)


def test_a_base_whose_matrices_cannot_be_read_stops_no_export_that_needs_none(tmp_path, target_folder, capsys):
    copied = Path(shutil.copytree(target_folder, tmp_path / "base"))
    os.truncate(copied / "model.safetensors", 100)
    folder = head_folder(tmp_path / "head", copied, base_model_fingerprint="some:0000")
    assert export(folder, tmp_path / "out") == 0
    assert "of the same sizes; weights not compared: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "message"),
    [(ViTConfig(), "vocab_size"), (T5Config(vocab_size=300, d_model=32), "an encoder-decoder model")],
)
def test_a_base_without_heads_is_refused(tmp_path, capsys, config, message):
    config.save_pretrained(tmp_path / "base")
    folder = head_folder(tmp_path / "head", None)
    assert message in refused(capsys, export(folder, tmp_path / "out", "--base_model", str(tmp_path / "base")))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 299}, "299"),
        ({"emb_dim": 31}, "31"),
    ],
)
def test_a_head_for_another_base_is_refused(tmp_path, target_folder, capsys, changes, message):
    folder = head_folder(tmp_path / "head", target_folder, **changes)
    assert message in refused(capsys, export(folder, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_decoding_json_is_exported_to_the_native_layout_only(head, tmp_path):
    (head / "decoding.json").write_text("{}")
    assert export(head, tmp_path / "native", layout="native") == 0
    assert (tmp_path / "native" / "decoding.json").read_text() == "{}"
    assert export(head, tmp_path / "ibm") == 0
    assert not (tmp_path / "ibm" / "decoding.json").exists()


def test_an_imported_head_drafts(head, tmp_path, target_folder, capsys):
    export(head, tmp_path / "ibm")
    export(tmp_path / "ibm", tmp_path / "native", layout="native")
    argv = ["generate", "--target", str(target_folder), "--prompt", "def f", "--max_new_tokens", "8"]
    capsys.readouterr()
    assert main([*argv]) == 0
    plain = capsys.readouterr().out
    assert main([*argv, "--speculator", str(tmp_path / "native")]) == 0
    assert capsys.readouterr().out == plain


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_export_has_the_dtype_that_the_flag_names(head, tmp_path, dtype, capsys):
    assert export(head, tmp_path / "out", "--dtype", dtype) == 0
    assert f"(MLPSpeculatorPreTrainedModel), {dtype}" in capsys.readouterr().out
    assert {str(t.dtype) for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {f"torch.{dtype}"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == dtype


def test_weights_too_large_for_float16_are_refused(head, tmp_path, capsys):
    tensors = load_file(head / "model.safetensors")
    tensors["ln.0.weight"][0] = 1e6
    save_file(tensors, head / "model.safetensors", metadata={"format": "pt"})
    assert "not finite" in refused(capsys, export(head, tmp_path / "out", "--dtype", "float16"))
    assert not (tmp_path / "out").exists()


def test_inspect_describes_a_head(head, tmp_path, target_folder, capsys):
    assert main(["inspect", str(head)]) == 0
    facts = {line[:17].strip(): line[17:] for line in capsys.readouterr().out.splitlines()}
    parameters = 2 * 300 * 16 + 32 * 16 + 16 * 16 + 2 * 16
    assert facts["layout"] == "native (MLPSpeculator)"
    assert facts["architecture"] == "MLP, 3 heads, tied, input scaled"
    assert facts["sizes"] == "hidden 32, inner 16, vocabulary 300"
    assert facts["parameters"] == f"{parameters:,}, float32"
    assert facts["base model"] == str(target_folder)
    assert facts["trained length"] == "256 tokens"
    assert facts["training data"] == "a, b"


@pytest.mark.parametrize("layout", ["ibm", "arctic", "native"])
def test_inspect_reads_every_layout(head, tmp_path, capsys, layout):
    export(head, tmp_path / "out", layout=layout)
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert f"layout           {layout} (" in shown
    for other in (
        "ibm: for vLLM 0.5.1 to 0.9.2 (V0 engine); TGI;",
        "arctic: for arctic-inference 0.3.0",
        "vllm-plugin: for vLLM 0.32.0",
        "native: for speculator",
    ):
        assert f"exports to       {other}" in shown


def test_a_draft_vocabulary_is_shown_and_exported_if_the_layout_stores_it(tmp_path, target_folder, capsys):
    folder = head_folder(tmp_path / "head", target_folder, draft_vocab_size=75)
    assert main(["inspect", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "draft vocabulary 75 of 300 tokens" in shown
    assert [line for line in shown.splitlines() if line.startswith("exports to")] == [
        "exports to       vllm-plugin: for vLLM 0.32.0 with this project's plugin",
        "exports to       native: for speculator",
    ]
    assert "no export to     ibm: ibm can't store a draft vocabulary" in shown
    assert "draft vocabulary" in refused(capsys, export(folder, tmp_path / "out"))
    assert export(folder, tmp_path / "out", layout="native") == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| draft vocabulary | 75 of 300 tokens |" in card
    assert "loads in vLLM 0.32.0 with this project's plugin" in card
    assert "vLLM 0.5.1" not in card


@pytest.mark.parametrize(
    ("layout", "unserved"),
    [
        ("ibm", "DOES NOT LOAD in vLLM 0.33 and later: no longer has this speculator"),
        ("speculators", "DOES NOT LOAD in llama.cpp 0.5: does not run fc_norm, norm_output"),
        ("dspark", "DOES NOT LOAD in SGLang 0.5.23: does not run a draft vocabulary"),
        ("gguf", ""),
    ],
)
def test_inspect_names_what_an_export_lacks_and_who_does_not_load_it(tmp_path, target, capsys, layout, unserved):
    if layout in ("dspark", "gguf"):
        head = tiny_block_head(target, aux_layers=[1], draft_tokens=[1, 2] if layout == "dspark" else None)
    else:
        config = tiny_head(architecture={"ibm": "mlp", "speculators": "eagle3"}[layout]).config
        config.own_embedding = False
        head = ARCHITECTURES["mlp" if layout == "ibm" else "eagle3"](config)
    head.config.base_model_name_or_path = "org/unknown"
    save(head, tmp_path / "head", layout_of("native", head))
    assert main(["inspect", str(tmp_path / "head")]) == 0
    start, shown = f"exports to       {layout}, but only with --base_model: ", capsys.readouterr().out
    (reason,) = (line.removeprefix(start) for line in shown.splitlines() if line.startswith(start))
    assert unserved in shown
    assert reason in refused(capsys, export(tmp_path / "head", tmp_path / "out", layout=layout))


def test_wrong_input_fails_in_one_line(head, tmp_path, capsys):
    assert "no config.json" in refused(capsys, main(["inspect", str(tmp_path / "nowhere")]))
    assert "no config.json" in refused(capsys, export(tmp_path / "nowhere", tmp_path / "out"))
    assert "not empty" in refused(capsys, export(head, head))
    save(tiny_head(), tmp_path / "cut", layout_of("native", tiny_head()))
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "model.safetensors" in refused(capsys, main(["inspect", str(tmp_path / "cut")]))
    with pytest.raises(SystemExit) as stopped:
        export(head, tmp_path / "out", layout="onnx")
    assert "invalid choice: 'onnx'" in refused(capsys, stopped.value.code)
    assert not (tmp_path / "out").exists()


def test_the_current_folder_can_be_the_output(head, tmp_path, monkeypatch, capsys):
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    assert export(head, ".", layout="native") == 0
    assert {"config.json", "model.safetensors", "README.md"} <= {path.name for path in (tmp_path / "out").iterdir()}


def words_of(how: str) -> list[str]:
    """Words of all commands in a line, as a shell reads them."""
    commands = [each for each in how.split(" (")[0].split(", then ") if not each.startswith("pip install")]
    return [word for command in commands for word in shlex.split(command)]


def test_a_shell_reads_the_printed_commands_as_they_are_meant(target):
    """Folders and targets with a space, a quote and a dollar."""
    folder, base = 'my "out" $1', "it's/a base"
    heads = [*(tiny_head(architecture=name) for name in ("mlp", "eagle3"))]
    heads += [tiny_block_head(target, aux_layers=[1])]
    heads += [tiny_block_head(target, aux_layers=[1], markov_rank=0, sample_from_anchor=False, confidence_head=False)]
    seen = set()
    for head, layout in ((head, layout) for head in heads for layout in layouts() if layout.stores(head)):
        head.config.base_model_name_or_path = base
        for server in (
            each for each in layout.servers(head.config, folder) if "serve " in each.how or "convert" in each.how
        ):
            seen.add(layout.name)
            words = words_of(server.how)
            named = [word for word in words if word in (folder, base)]
            named += [json.loads(word)["model"] for word in words if word.startswith('{"') and '"model"' in word]
            assert set(named) == {folder, base}, server.how
    assert seen >= {"ibm", "arctic", "vllm-plugin", "eagle3", "speculators", "dspark", "dflash"}
    mtp = tiny_mtp_head(target)
    lines = [server.how for server in layout_of("mtp", mtp).servers(mtp.config, folder) if "serve " in server.how]
    assert len(lines) == 2
    assert all(folder in words_of(line) for line in lines)


def test_a_call_in_python_names_any_folder(target):
    folder, calls = 'my "out"', 0
    head = tiny_block_head(target, aux_layers=[1], markov_rank=0, sample_from_anchor=False, confidence_head=False)
    for layout in (layout for layout in layouts() if layout.stores(head)):
        for server in (each for each in layout.servers(head.config, folder) if "from_pretrained" in each.how):
            compile(server.how.split(", which")[0].replace("...", "x=1"), "printed", "eval")
            assert json.dumps(folder) in server.how
            calls += 1
    assert calls == 2
