"""`eval lossless` passes exact drafters and fails every kind of inexactness."""

import copy
import json
import math
import shutil

import pytest
import torch
from conftest import CONFIGS, MisstatedHead, tiny_head, tiny_model, tiny_tokenizer, write_tuning
from drafters import make_drafter
from transformers import AutoModelForCausalLM

from eval import lossless
from eval.__main__ import main
from eval.greedy_check import compare_completions, greedy_checks
from eval.sampled_check import sampled_checks
from eval.timing import as_loaded
from speculator import (
    DraftModelDrafter,
    HeadDrafter,
    MLPSpeculator,
    MLPSpeculatorConfig,
    NgramDrafter,
    Target,
    Tree,
    generate,
)
from speculator.__main__ import build_parser
from speculator.checkpoints import load_any
from speculator.decoding.draft import take_at
from speculator.decoding.verify import REJECTION_RULES
from speculator.drafters.tuning import adaptive_drafter, read_tuning
from speculator.target.attention.attention import ATTENTION
from speculator.target.cache.kv_cache import KVCache

PROMPTS = [[1, 2, 3, 4, 5, 1, 2], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 1]]
SAMPLES = 250


def warm_target() -> Target:
    """A target with several likely tokens, so that an inexact rule shows."""
    return Target(tiny_model(scale=2.0), tokenizer=None)


def failures(checks) -> set[str]:
    return {check.name for check in checks if not check.passed}


@pytest.mark.parametrize(
    "name",
    [
        "head-candidates",
        "attention-tree",
        "ngram",
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("head-chain", "head-tree", "model-chain")),
    ],
)
def test_every_drafter_passes_greedy_and_sampled(target, name):
    greedy = greedy_checks(target, make_drafter(name, target), PROMPTS, max_new_tokens=24)
    assert [check.result for check in greedy[1:]] == ["3 of 3 identical"] * 3
    assert not failures(greedy)
    warm = warm_target()
    sampled = sampled_checks(warm, make_drafter(name, warm), PROMPTS[:2], [1.0], SAMPLES)
    assert len(sampled) == 2
    assert not failures(sampled)
    assert name == "ngram" or sampled[0].figures["drafted_share"] > 0.01


def test_a_completion_that_ends_at_eos_passes():
    target = Target(tiny_model(), tokenizer=None)
    completion = generate(target, None, PROMPTS[:1], max_new_tokens=24).tokens[0]
    target.model.generation_config.eos_token_id = completion[9]
    assert len(generate(target, None, PROMPTS[:1], max_new_tokens=24).tokens[0]) < 24
    assert not failures(greedy_checks(target, NgramDrafter(), PROMPTS[:1], max_new_tokens=24))


@pytest.fixture
def inexact_rule(monkeypatch):
    """Replace `block` by a rule that accepts every draft token."""
    monkeypatch.setitem(REJECTION_RULES, "block", lambda p, draft, u: (draft.lengths, take_at(p, draft.lengths)))


def test_an_inexact_rule_fails(inexact_rule):
    target = warm_target()
    checks = sampled_checks(target, HeadDrafter(tiny_head()), PROMPTS[:2], [1.0], 1000, rule="block")
    assert any(check.figures["p"] < 1e-6 for check in checks)
    assert failures(checks)


def test_a_drafter_that_misstates_its_distribution_fails():
    checks = sampled_checks(warm_target(), MisstatedHead(tiny_head()), PROMPTS[:2], [1.0], 2000, rule="block")
    assert failures(checks)


def test_bfloat16_passes_and_noise_in_the_verification_fails(monkeypatch):
    target = Target(tiny_model().to(torch.bfloat16), tokenizer=None)
    drafter = HeadDrafter(tiny_head().to(torch.bfloat16))
    prompts = [[number, 2 * number, 7] for number in range(6)]
    checks = greedy_checks(target, drafter, prompts, max_new_tokens=24)
    assert not failures(checks)
    assert checks[0].figures["tolerance"] < 1.0

    honest = Target.extend

    def disturbed(self, cache, tokens, *args, **kwargs):
        hidden = honest(self, cache, tokens, *args, **kwargs)
        if tokens.shape[1] == drafter.nodes + 1 and cache.lengths[0] > 3:  # a verification, not a prompt of 3 tokens
            generator = torch.Generator().manual_seed(int(tokens.sum()))
            hidden = hidden + 0.5 * torch.randn(hidden.shape, generator=generator).to(hidden)
        return hidden

    monkeypatch.setattr(Target, "extend", disturbed)
    assert {
        "logits against plain decoding",
        "completion against plain decoding",
        "completion against transformers",
    } <= failures(greedy_checks(target, drafter, prompts, max_new_tokens=24))


def test_a_cache_that_keeps_the_wrong_positions_fails(target, monkeypatch):
    """The drafter is nearly always right, in float32: only the keys and values of accepted tokens are wrong."""
    drafter = DraftModelDrafter(Target(tiny_model(), tokenizer=None), target, Tree((3, 2, 1), 6))
    assert not failures(greedy_checks(target, drafter, PROMPTS, max_new_tokens=24))
    monkeypatch.setattr(KVCache, "gather", lambda self, path: None)
    assert "logits against plain decoding" in failures(greedy_checks(target, drafter, PROMPTS, max_new_tokens=24))


def test_transformers_decodes_with_the_attention_of_the_model():
    """gpt-oss has eager attention; its settings are restored even after an error."""
    target = Target(tiny_model("gpt_oss"), tokenizer=None)
    target.model.generation_config.eos_token_id = 3
    assert not failures(greedy_checks(target, HeadDrafter(tiny_head()), PROMPTS, max_new_tokens=16))
    with as_loaded(target):
        assert target.model.config._attn_implementation == "eager"
    target.original_attention = "missing"
    with pytest.raises(ValueError, match="missing"), as_loaded(target):
        pass
    assert target.eos_token_ids == {3}
    assert target.model.config._attn_implementation == ATTENTION


def test_completions_may_differ_only_where_the_two_largest_logits_are_close():
    reference, gap = [5, 6, 7, 8], [3.0, 0.1, 3.0, 3.0]

    def parted(text):
        return compare_completions("", [text], [reference], [gap], tolerance=0.2)

    assert parted([5, 6, 7, 8]).result == "1 of 1 identical"
    assert parted([5, 9, 1, 1]).passed
    assert parted([5, 9, 1, 1]).result == "0 of 1 identical"
    assert not parted([5, 6, 9, 8]).passed
    assert not parted([5, 6, 7]).passed  # a text that just ends is no tie
    assert not parted([5, 6, 7, 8, 9]).passed
    assert not compare_completions("", [[5, 9]], [reference], [[3.0, math.nan, 0.0, 0.0]], tolerance=0.2).passed


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of a target with sharp distributions and of its head, and a file of text."""
    base = tmp_path_factory.mktemp("lossless")
    config = copy.deepcopy(CONFIGS["llama"])
    config.vocab_size = 300
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data *= 3.0 if parameter.ndim == 2 else 1.0
    model.save_pretrained(base / "target")
    tiny_tokenizer().save_pretrained(base / "target")
    head = MLPSpeculator(MLPSpeculatorConfig(vocab_size=300, emb_dim=32, inner_dim=16, n_predict=3))
    head.save_pretrained(base / "head")
    rows = [{"text": f"def number_{n}():\n    return {n} * {n} + {n}\n" * 4} for n in range(4)]
    (base / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return base


def command(folders, *flags, samples=300):
    sizes = ["--max_prompts", "2", "--prompt_tokens", "12", "--max_new_tokens", "16"]
    target = ["--target", str(folders / "target"), "--suite", str(folders / "text.jsonl")]
    return main(["lossless", *target, *sizes, "--samples", str(samples), *flags])


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        (["--speculator", "head", "--rule", "rejection", "--num_speculative_tokens", "2"], "rejection"),
        (["--speculator", "head", "--num_speculative_tokens", "2", "--temperature", "0.7"], "match"),
        (["--speculator", "head", "--branches", "3,2", "--rule", "multi_candidate"], "multi_candidate"),
        (["--draft_model", "target", "--num_speculative_tokens", "2", "--temperature", "1"], "match"),
    ],
)
def test_the_command_proves_a_lossless_drafter(folders, tmp_path, capsys, flags, rule):
    flags = [str(folders / flag) if flag in ("head", "target") else flag for flag in flags]
    assert command(folders, *flags, "--output", str(tmp_path / "checks.json")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "LOSSLESS"
    report = json.loads((tmp_path / "checks.json").read_text())
    assert report["lossless"]
    assert report["rule"] == rule
    assert sum(line.endswith("| pass |") for line in lines) == len(report["checks"])
    assert [path.name for path in tmp_path.iterdir()] == ["checks.json"]


def test_adaptive_drafting_of_a_tuned_head_is_checked_too(folders, tmp_path, capsys):
    """Drafts of the head and of lookup cost nearly nothing, so both are used."""
    head = tmp_path / "head"
    shutil.copytree(folders / "head", head)
    write_tuning(head, costs=[{"rows": 1, "greedy": True, "head": 0.01, "path": 0.0, "level": 0.0, "token": 0.001}])
    assert command(folders, "--speculator", str(head), "--output", str(tmp_path / "checks.json")) == 0
    checks = json.loads((tmp_path / "checks.json").read_text())["checks"]
    names = [check["name"] for check in checks]
    assert names == [*names[: len(names) // 2], *(f"adaptive: {name}" for name in names[: len(names) // 2])]
    shares = [check["figures"]["drafted_share"] for check in checks if check["name"].startswith("adaptive: completion")]
    assert min(shares) > 0.02
    assert capsys.readouterr().out.splitlines()[-1] == "LOSSLESS"


def test_the_tuning_of_a_head_on_the_hub_is_read(folders, tmp_path, monkeypatch):
    head = tmp_path / "head"
    shutil.copytree(folders / "head", head)
    write_tuning(head)
    monkeypatch.setattr("eval.lossless.head_folder", lambda name, revision: {("org/head", "v1"): head}[name, revision])
    target = Target.load(str(folders / "target"))
    drafter = HeadDrafter(load_any(head))
    flags = ["--target", "T", "--speculator", "org/head", "--speculator_revision", "v1"]
    made = lossless._adaptive(build_parser("eval lossless").parse_args(flags), target, drafter)
    tuned = adaptive_drafter(drafter.head, target, read_tuning(head, drafter.head))
    ours, theirs, untuned = (
        [choice.acceptance for choice in each.choices]
        for each in (made, tuned, adaptive_drafter(drafter.head, target, None))
    )
    assert ours == theirs != untuned


def test_the_command_reports_an_inexact_rule_by_its_exit_code(inexact_rule, folders, capsys):
    flags = ["--speculator", str(folders / "head"), "--rule", "block"]
    assert command(folders, *flags, samples=1000) == 1
    output = capsys.readouterr().out
    assert "FAIL" in output
    assert output.splitlines()[-1].startswith("NOT LOSSLESS: distribution after prompt")


def test_open_numbers_of_prompts_and_samples_fit_a_quarter_of_an_hour(target_folder, capsys, monkeypatch):
    """At 0.1 s a step, 8 decodings of 20 tokens make a prompt take 16 s, at temperatures 0 and 1."""
    seconds = {1: 0.1, 128: 2.0}
    monkeypatch.setattr(lossless, "step_seconds", lambda target, prompt, rows: seconds[rows])
    monkeypatch.setattr(lossless, "greedy_checks", lambda target, who, prompts, *_: asked.append(len(prompts)) or [])
    monkeypatch.setattr(lossless, "coupled_checks", lambda *_: [])

    def sampled(target, who, prompts, temperatures, samples, *_):
        asked.append(samples)
        return sampled_checks(target, who, prompts[:1], temperatures, 128)

    monkeypatch.setattr(lossless, "sampled_checks", sampled)
    flags = ["lossless", "--target", str(target_folder), "--ngram", "--max_new_tokens", "20", "--prompt_tokens", "16"]
    for given, expected in (([], [28, 1152]), (["--max_prompts", "2", "--samples", "256"], [2, 256])):
        asked: list[int] = []
        assert main([*flags, *given]) == 0
        assert asked == expected
        assert "about 0:" in capsys.readouterr().err
