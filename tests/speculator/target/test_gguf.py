import builtins
import random
from collections import Counter

import numpy as np
import pytest
import torch
import transformers.quantizers.quantizer_gguf as quantizer
from conftest import tiny_tokenizer
from gguf_files import TEMPLATE, tiny_llama, write_gguf
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data.cli.generate import _context_length
from data.rendering import load_tokenizer
from speculator import Sampling, Target, UserError, generate
from speculator.__main__ import build_parser
from speculator.checkpoints.layout import base_config
from speculator.target.gguf import header as gguf_header
from speculator.target.gguf.file import end_tokens, metadata, read_tokenizer
from speculator.target.gguf.splits import SPLITS, set_split
from train.command_line import parse
from train.door.settle import known_config

gguf = pytest.importorskip("gguf")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = tiny_tokenizer(280)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_llama(len(tokenizer))


@pytest.fixture(scope="module")
def file(tmp_path_factory, model, tokenizer):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.F32.gguf", model, tokenizer)


@torch.no_grad()
def test_a_target_has_the_weights_tokenizer_and_settings_of_its_file(file, model, tokenizer):
    target = Target.load(str(file))
    assert target.name == str(file)
    assert not hasattr(target.config, "quantization_config")  # dequantised
    assert target.eos_token_ids == set(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<eos>"]))
    assert target.context_length == 128
    assert target.tokenizer.chat_template == TEMPLATE
    text = "<|im_start|>user\ndef wrap(self, text):<|im_end|>"
    tokens = tokenizer(text)["input_ids"]
    assert target.tokenizer(text, add_special_tokens=False)["input_ids"] == tokens
    assert load_tokenizer(str(file))(text, add_special_tokens=False)["input_ids"] == tokens
    ours = target.logits(target.hidden(torch.tensor([tokens])))
    torch.testing.assert_close(ours, model(torch.tensor([tokens])).logits, atol=1e-5, rtol=1e-4)
    assert len(generate(target, None, [tokens], Sampling(), max_new_tokens=4).tokens[0]) <= 4


def test_the_config_is_read_without_the_weights(file, tmp_path):
    flags = ["--target", str(file), "--sources", "x", "--output", "y"]
    assert _context_length(build_parser("data generate").parse_args(flags)) == 128
    known = known_config(parse(["--target.name_or_path", str(file)]))
    for config in (known, base_config(str(file))):
        assert (config.model_type, config.hidden_size, config.max_position_embeddings) == ("llama", 32, 128)
    assert base_config(str(tmp_path / "none.gguf")) is None
    with pytest.raises(UserError, match=r"none\.gguf"):
        known_config(parse(["--target.name_or_path", str(tmp_path / "none.gguf")]))


@pytest.mark.parametrize("field", ["context_length", "eos_token_id", "tokens"])
def test_a_missing_field_is_named(tmp_path, model, tokenizer, field):
    file = write_gguf(tmp_path / "less.gguf", model, tokenizer, leave_out=field)
    for load in (Target.load, load_tokenizer):
        with pytest.raises(UserError, match=field):
            load(str(file))


@pytest.mark.parametrize("kept", [40, 2000, -100])
def test_a_truncated_file_fails_in_one_line(file, tmp_path, kept):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(UserError, match=r"cut\.gguf") as error:
        Target.load(str(cut))
    assert "\n" not in str(error.value)


def test_a_file_of_another_format_is_a_user_error(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"PK\x03\x04")
    (tmp_path / "c.gguf").mkdir()
    for name in ("a.gguf", "b.gguf", "c.gguf"):
        with pytest.raises(UserError, match=name):
            Target.load(str(tmp_path / name))


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_missing_package_is_named(file, monkeypatch, package):
    original = builtins.__import__

    def without(name, *rest, **named):
        if name.split(".")[0] == package:
            raise ImportError(name)
        return original(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=f"pip install {package}"):
        Target.load(str(file))


def test_loading_shows_no_progress_bar_without_a_terminal(file, capfd):
    Target.load(str(file))
    assert "de-quantizing" not in capfd.readouterr().err


def test_the_header_is_parsed_once_per_command_and_by_no_slow_reader(file, monkeypatch):
    reads = Counter()

    def counted(*arguments):
        reads["header"] += 1
        return original(*arguments)

    original = gguf_header._Cursor
    gguf_header.read_header.cache_clear()
    monkeypatch.setattr(gguf_header, "_Cursor", counted)
    monkeypatch.setattr(gguf, "GGUFReader", None)
    Target.load(str(file))
    load_tokenizer(str(file))
    base_config(str(file))
    assert reads["header"] == 1


def test_config_and_tokenizer_are_made_once_per_file(file, model, tokenizer, tmp_path, monkeypatch, cache):
    Target.load(str(file))
    made = sorted(cache.rglob("tokenizer.json"))
    moved = tmp_path / "moved.gguf"
    moved.write_bytes(file.read_bytes())
    with monkeypatch.context() as patch:
        patch.setattr("speculator.target.gguf.file.quick_loader", None)
        load_tokenizer(str(moved))  # the same bytes
        base_config(str(moved))
    write_gguf(moved, model, tokenizer, changes={"context_length": 64})
    assert base_config(str(moved)).max_position_embeddings == 64
    assert len(made) == 1
    assert len(sorted(cache.rglob("tokenizer.json"))) == 2


def test_a_cache_that_cannot_be_written_keeps_nothing(file, monkeypatch, tmp_path):
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path / "taken"))
    assert Target.load(str(file)).context_length == 128


def test_the_tokenizer_is_the_one_that_transformers_builds(file):
    theirs, ours = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name), read_tokenizer(str(file))
    for text in (
        "  two  spaces\n\n\tx = 12345",
        "naïve 北京 🤷🏽\u200d♀️",
        "<|im_start|>user\nhi<|im_end|>",
        "\u00a0\u2028",
    ):
        tokens = theirs(text)["input_ids"]
        assert ours(text)["input_ids"] == tokens
        assert ours.decode(tokens) == theirs.decode(tokens)
    for name in ("chat_template", "all_special_ids", "eos_token", "bos_token", "pad_token", "padding_side"):
        assert getattr(ours, name) == getattr(theirs, name)


def pieces(tokenizer, text: str) -> list[str]:
    return [text[begin:end] for _, (begin, end) in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("smollm", "a  12 b", ["a", "  ", "1", "2", " b"]),
        ("llama-bpe", "I'LL pay  12345\n\n x", ["I", "'LL", " pay", " ", " ", "123", "45", "\n\n", " x"]),
        ("qwen2", "x  12", ["x", " ", " ", "1", "2"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", " ", "1", "2"]),
        ("deepseek-v3", "x=1234 (foo) 你好", ["x", "=", "123", "4", " (", "foo", ")", " ", "你好"]),
        ("deepseek-coder", "x = 12\n  y", ["x", " = ", "1", "2", "\n", " ", " y"]),
        ("seed-coder", "f()\n\n12", ["f", "()", "\n\n", "1", "2"]),
        ("bailingmoe2", "don't\n\n", ["don", "'t", "\n\n"]),
        ("gpt-2", "a  12 b", ["a", " ", " 12", " b"]),
    ],
)
def test_text_is_split_as_the_file_says(tmp_path, model, tokenizer, name, text, expected):
    file = write_gguf(tmp_path / "tiny.gguf", model, tokenizer, changes={"pre": name})
    assert pieces(read_tokenizer(str(file)), text) == expected


def test_splits_are_those_of_transformers_where_it_knows_them():
    module = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    theirs = getattr(module, "GGUF_PRE_TOKENIZER_SPLITS", None)
    if theirs is None:
        pytest.skip("this transformers has no table of splits")
    letters = "aB1 \t\n\r'sé\u0301\u4e2d\U0001f642\u200d\u0e01\u0627\u00a0\u3000\u2028\u01c5\u00bd.,/(_-"
    draw = random.Random(0)
    texts = ["".join(draw.choices(letters, k=30)) for _ in range(100)]
    for name in theirs.keys() & SPLITS.keys():
        ours = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(each), "isolated") for each in SPLITS[name]])
        own = pre_tokenizers.Split(Regex(theirs[name]), "isolated")
        assert all(ours.pre_tokenize_str(text) == own.pre_tokenize_str(text) for text in texts), name


@pytest.mark.parametrize(("name", "tokens"), [("llama-bpe", ["ab"]), ("dbrx", ["a", "b"])])
def test_a_piece_of_the_vocabulary_is_one_token_where_llama_cpp_ignores_merges(name, tokens):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [])))
    set_split(tokenizer, name)
    assert tokenizer.tokenize("ab") == tokens


def test_a_split_that_is_not_known_is_said_once(tmp_path, model, tokenizer, caplog):
    file = write_gguf(tmp_path / "tiny.gguf", model, tokenizer, changes={"pre": "of-tomorrow"})
    for _ in range(2):
        read_tokenizer(str(file))
    (line,) = [record.getMessage() for record in caplog.records if "of-tomorrow" in record.getMessage()]
    assert "other tokens than in llama.cpp" in line


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q5_0", "Q4_1"])
def test_weights_are_dequantised_as_the_package_does(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(gguf_header, "_BYTES_AT_ONCE", 200)  # less than all rows
    rows = np.random.default_rng(0).normal(size=(2, 7, 64)).astype(np.float32)
    number = gguf.GGMLQuantizationType[kind]
    stored = gguf.quants.quantize(rows, number)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("odd", np.zeros(3, np.float32))  # what follows is aligned
    writer.add_tensor("a", stored, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = gguf.dequantize(gguf.GGUFReader(tmp_path / "a.gguf").tensors[1].data, number)
    with gguf_header.quick_loader():
        (_, read) = gguf.GGUFReader(tmp_path / "a.gguf").tensors
        made = gguf.dequantize(read.data, read.tensor_type)
    assert made.shape == (2, 7, 64)
    assert np.array_equal(made, expected)


def test_metadata_are_those_that_the_package_reads(file):
    header = metadata(str(file))
    theirs = gguf.GGUFReader(file).fields
    assert header.fields == {key: each.contents() for key, each in theirs.items() if not key.startswith("GGUF.")}
    assert header.types == {key: each.types[-1] for key, each in theirs.items() if key in header.fields}


NORMAL, CONTROL = 1, 3


@pytest.mark.parametrize(
    ("vocabulary", "ends"),
    [
        (
            {"<|endoftext|>": CONTROL, "<|im_end|>": CONTROL, "<|fim_pad|>": CONTROL, "<|fim_middle|>": CONTROL},
            {0, 1, 2},
        ),
        ({"<|eot_id|>": CONTROL, "<|eom_id|>": CONTROL, "<|end_of_text|>": CONTROL}, {0, 1, 2}),
        ({"<eos>": CONTROL, "<end_of_turn>": CONTROL, "</s>": NORMAL}, {0, 1}),
        ({"<\uff5cend▁of▁sentence\uff5c>": CONTROL, "</s>": NORMAL, "EOT": CONTROL}, {0}),
        ({"<|end|>": CONTROL, "<|return|>": CONTROL, "<|call|>": CONTROL}, {1, 2}),  # <|end|> ends a part of an answer
        ({"<|end|>": CONTROL, "<|user|>": CONTROL}, {0}),
        ({"<eos>": CONTROL, "<|tool_response>": CONTROL, "</s>": CONTROL}, {0, 1}),
    ],
)
def test_control_tokens_with_the_name_of_an_end_end_a_completion(vocabulary, ends):
    names = [*vocabulary, "marked"]
    fields = {"tokens": names, "token_type": [*vocabulary.values(), NORMAL], "eos_token_id": names.index("marked")}
    header = gguf_header.Header(
        fields={f"tokenizer.ggml.{key}": value for key, value in fields.items()}, types={}, tensors=[], digest=""
    )
    assert set(end_tokens(header)) == ends | {names.index("marked")}


def test_a_target_ends_at_every_end_token_of_its_file(tmp_path, model, tokenizer):
    names = ["<|im_end|>", "<|endoftext|>", "<eos>"]
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    tokens[tokens.index("<|im_start|>")] = "<|endoftext|>"
    file = write_gguf(tmp_path / "two.gguf", model, tokenizer, changes={"tokens": tokens})
    target = Target.load(str(file))
    assert target.eos_token_ids == {tokens.index(name) for name in names}


def test_nothing_is_said_about_packed_weights(file, monkeypatch):
    said = []
    monkeypatch.setattr(quantizer.logger, "warning", said.append)
    Target.load(str(file), dtype="bfloat16")
    assert said == []


BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SCALED = {
    "llama3": {"factor": 8.0, **BANDS},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
}


@torch.no_grad()
@pytest.mark.parametrize("kind", SCALED)
def test_the_rope_is_scaled_as_in_the_file(tmp_path, tokenizer, kind):
    """Llama 3's scaling is a tensor in the file, made as llama.cpp's converter makes it; the others are metadata."""
    torch.manual_seed(0)
    rope = {"rope_type": kind, "rope_theta": 500000.0, **SCALED[kind]}
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1}
    config = LlamaConfig(vocab_size=len(tokenizer), **shape, max_position_embeddings=128, rope_parameters=rope)
    config.num_key_value_heads, config.tie_word_embeddings = 1, False
    model = LlamaForCausalLM(config).eval()
    for layer in model.model.layers:  # sharp attention, which sees the angles
        layer.self_attn.q_proj.weight.mul_(100)
    rope_of_file = {"freq_base": 500000.0}
    changes = {"rope": rope_of_file}
    if kind == "llama3":
        plain = 500000.0 ** -(torch.arange(0, 64, 2).float() / 64)
        changes["rope_freqs"] = (plain / model.model.rotary_emb.inv_freq).numpy()
    else:
        rope_of_file |= {"scaling.type": kind, "scaling.factor": 4.0}
        if kind == "yarn":
            rope_of_file["scaling.original_context_length"] = 32
    target = Target.load(str(write_gguf(tmp_path / "scaled.gguf", model, tokenizer, changes=changes)))
    tokens = torch.arange(100)[None] % len(tokenizer)
    expected, ours = model(tokens).logits, target.logits(target.hidden(tokens))
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)
    plain_file = write_gguf(tmp_path / "plain.gguf", model, tokenizer, changes={"rope": {"freq_base": 500000.0}})
    plain = Target.load(str(plain_file))
    assert (plain.logits(plain.hidden(tokens)) - expected).abs().max() > 1e-3, "the scaling changes the logits"


def test_a_rope_that_transformers_lacks_is_refused(tmp_path, model, tokenizer):
    odd = {"rope_freqs": torch.tensor([1.0, 2.0, 3.0, 4.0]).numpy()}
    with pytest.raises(UserError, match=r"rope_freqs\.weight"):
        Target.load(str(write_gguf(tmp_path / "odd.gguf", model, tokenizer, changes=odd)))
    longrope = {"rope": {"scaling.type": "longrope", "scaling.factor": 4.0}}
    with pytest.raises(UserError, match="longrope"):
        Target.load(str(write_gguf(tmp_path / "long.gguf", model, tokenizer, changes=longrope)))


def test_tokens_have_the_texts_and_ids_of_the_file(tmp_path, tokenizer):
    """DeepSeek's marks are not ASCII; a converter fills the vocabulary up with unused tokens."""
    names = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    names += ["<\uff5cUser\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[PAD304]", "[PAD305]"]
    changes = {"tokens": names, "unused": names[-2:]}
    file = write_gguf(tmp_path / "marks.gguf", tiny_llama(len(names)), tokenizer, changes=changes)
    target = Target.load(str(file))
    made = target.tokenizer
    assert len(made) == len(names) - 2
    assert "[PAD304]" not in made.get_vocab()
    text = f"{names[-4]}def wrap{names[-3]}"
    ids = made(text, add_special_tokens=False)["input_ids"]
    assert [ids[0], ids[-1]] == [len(names) - 4, len(names) - 3]
    assert made.convert_ids_to_tokens([ids[0], ids[-1]]) == names[-4:-2]
    assert made.decode(ids, skip_special_tokens=True) == "def wrap"
    assert max(made.get_vocab().values()) < target.vocab_size
    changes |= {"add_bos": True, "bos": len(names) - 4}
    begun = load_tokenizer(str(write_gguf(tmp_path / "bos.gguf", tiny_llama(len(names)), tokenizer, changes=changes)))
    assert begun("def wrap")["input_ids"] == ids[:-1]
    assert ids[1:-1] == tokenizer("def wrap", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("split", "field", "begins"),
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("qwen2", None, False), ("qwen2", True, True)],
)
def test_text_begins_with_bos_where_it_does_in_llama_cpp(tmp_path, model, tokenizer, split, field, begins):
    changes = {"pre": split} | ({} if field is None else {"add_bos": field})
    made = load_tokenizer(str(write_gguf(tmp_path / "bos.gguf", model, tokenizer, changes=changes)))
    ids = made("def wrap")["input_ids"]
    assert (ids[0] == made.bos_token_id) == begins
    assert ids[begins:] == tokenizer("def wrap", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3"])
def test_a_sentencepiece_file_keeps_its_tokens_and_begins_with_bos(tmp_path, architecture):
    """Gemma's converter marks runs of spaces as user-defined tokens."""
    marks, pieces, spaces = ["<unk>", "<s>", "</s>"], ["▁", "a", "b", "▁a", "ab"], ["  ", "   "]
    tokens = [*marks, *(f"<0x{value:02X}>" for value in range(256)), *pieces, *spaces]
    writer = gguf.GGUFWriter(tmp_path / "piece.gguf", architecture)
    for add, value in (
        (writer.add_context_length, 128),
        (writer.add_embedding_length, 32),
        (writer.add_block_count, 2),
        (writer.add_feed_forward_length, 64),
        (writer.add_head_count, 4),
        (writer.add_head_count_kv, 2),
        (writer.add_key_length, 8),
        (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_tokenizer_model, "llama"),
        (writer.add_token_list, tokens),
        (writer.add_token_types, [2, 3, 3, *[6] * 256, *[1] * 5, 4, 4]),
        (writer.add_token_scores, [*[0.0] * 259, -1.0, -2.0, -3.0, -4.0, -5.0, 0.0, 0.0]),
        (writer.add_bos_token_id, 1),
        (writer.add_eos_token_id, 2),
        (writer.add_unk_token_id, 0),
    ):
        add(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    made = load_tokenizer(str(tmp_path / "piece.gguf"))
    ids = made("ab  a b")["input_ids"]
    assert ids[0] == 1
    assert set(ids[1:]) <= set(range(259, len(tokens))), "no unknown token, and none in bytes"
    assert made.decode(ids[1:]).strip() == "ab  a b"
