"""Figures of a report: categories, contexts, batches, conversations, intervals and warnings."""

import json
import math
import random
import statistics
from dataclasses import replace

import pytest
import torch
from conftest import VOCAB, measured, tiny_head, tiny_model, tiny_tokenizer
from reports import report_row
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from eval.decoders import assisted_settings, decoders, measure_suite
from eval.intervals import paired_bootstrap
from eval.metrics import by_context
from eval.report import warnings
from eval.suites import Suite, load_suite
from eval.timing import Timed, time_transformers
from eval.validation import real_acceptance
from speculator import HeadDrafter, MLPSpeculator, MLPSpeculatorConfig, Sampling, Step, Target, generate
from speculator.acceptance import Acceptance
from speculator.prompts import Conversation
from speculator.report import Interval


def talking_target(eos: int | None = None) -> Target:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=300, max_position_embeddings=128, **shape, eos_token_id=eos, bos_token_id=None)
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data *= 4 if parameter.ndim == 2 else 1
    return Target(model, tiny_tokenizer())


def talking_head(**options):
    torch.manual_seed(1)
    return MLPSpeculator(MLPSpeculatorConfig(vocab_size=300, emb_dim=32, inner_dim=16, n_predict=3, **options))


def questions(tmp_path, *rows) -> str:
    file = tmp_path / "question.jsonl"
    file.write_text("".join(json.dumps({"category": c, "turns": turns}) + "\n" for c, turns in rows))
    return str(file)


def report_of(target, suite, folder, head=None, **options) -> dict:
    settings = {"temperatures": [0.0], "max_new_tokens": 16, "speculator_name": "test", **options}
    return measured(target, head or talking_head(), [suite], folder, **settings)


def test_categories_add_up_and_one_prompt_has_no_interval(tmp_path, quick):
    rows = [("a", ["one two"]), ("a", ["three", "four"]), ("a", ["five"]), ("b", ["six", "seven"])]
    target = talking_target()
    suite = load_suite(questions(tmp_path, *rows), target, prompt_tokens=8, max_prompts=9, max_new_tokens=16)
    report = report_of(target, suite, tmp_path / "out")
    for row in report["suites"]:
        assert row["prompts"] == 4
        assert row["turns"] == 6
        parts = {part["name"]: part for part in row["categories"]}
        assert {name: part["turns"] for name, part in parts.items()} == {"a": 4, "b": 2}
        assert sum(part["steps"] for part in parts.values()) == row["steps"]
        if row["drafter"] != "none":
            assert parts["a"]["speedup"]["plain"]["low"] is not None
            assert parts["b"]["speedup"]["plain"]["low"] is None, "two turns of one conversation are one sample"
            assert parts["b"]["acceptance_length_interval"] == {"low": None, "high": None}
    text = (tmp_path / "out" / "report.md").read_text()
    assert "(one sample)" in text
    assert "4 prompts, 6 turns" in text
    assert (tmp_path / "out" / "categories.png").exists()
    json.loads((tmp_path / "out" / "report.json").read_text(), parse_constant=pytest.fail)  # no NaN


def test_every_decoder_answers_the_second_turn_after_the_answer_of_plain_decoding(tmp_path, figures_only):
    target = talking_target()
    suite = load_suite(
        questions(tmp_path, ("a", ["one", "two"])), target, prompt_tokens=8, max_prompts=9, max_new_tokens=8
    )
    asked = []
    for temperature in (0.0, 1.0):
        table, _ = decoders(target, talking_head(), [3], None, (), 1)
        for decoder in table:

            def run(prompts, *rest, at=temperature, key=decoder.key, run=decoder.run):
                asked.append((at, key, prompts))
                run(prompts, *rest)

            decoder.run = run
        measured = measure_suite(target, table, suite, Sampling(temperature), 8)
        second = [(key, prompts) for t, key, prompts in asked if t == temperature and prompts != [suite.prompts[0]]]
        assert {key for key, _ in second} == {"none", "head", "ngram", "hf_generate"}
        question = target.tokenizer("\n\ntwo")["input_ids"]
        first_answer = measured.timed["none"].batches[0].tokens[0]
        assert all(prompts == [[*suite.prompts[0], *first_answer, *question]] for _, prompts in second)


def test_an_answer_ends_where_the_target_ends_it(tmp_path, figures_only):
    """Chats and texts stop at EOS in every decoder, and the next turn omits it."""
    plain = talking_target()
    one, two = ([{"role": "user", "content": text}] for text in ("one", "two"))
    talk = Conversation(plain.tokenizer("one")["input_ids"], one, [two])
    suite = Suite("s", [talk.ids], [talk])
    table, _ = decoders(plain, talking_head(), [3], None, (), 1)
    free = measure_suite(plain, table, suite, Sampling(), 16).timed["none"].tokens[0]
    eos = free[6]
    target = talking_target(eos)
    target.model.generation_config.eos_token_id = eos
    target.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    suite.conversations = [replace(talk, chat=True)]
    table, _ = decoders(target, talking_head(), [3], None, (), 1)
    measured = measure_suite(target, table, suite, Sampling(), 16)
    cut = free[: free.index(eos) + 1]
    for timed in measured.timed.values():
        assert timed.tokens[0] == cut
    lengths = measured.timed["none"].batches[1].prompt_lengths
    assert lengths == [len(suite.conversations[0].after(target.tokenizer, cut[:-1]).ids)]
    suite.conversations = [talk]
    again = measure_suite(target, table, suite, Sampling(), 16)
    assert all(timed.tokens[0] == cut for timed in again.timed.values())


def test_a_conversation_that_outgrows_the_context_ends_there(tmp_path, figures_only):
    target = talking_target()
    rows = questions(tmp_path, ("a", ["one", "two " * 60, "three"]), ("a", ["four"]))
    suite = load_suite(rows, target, prompt_tokens=8, max_prompts=9, max_new_tokens=16)
    report = report_of(target, suite, tmp_path / "out")
    assert report["suites"][0]["left_out"] == {"prompts": 0, "turns": 2}
    assert report["suites"][0]["turns"] == 2
    assert any("2 turns left out" in line for line in report["warnings"])


def test_batches_give_every_prompt_its_own_text(tmp_path, figures_only):
    """Transformers pads prompts of different lengths; greedy completions are the same alone and in batches."""
    target = Target(tiny_model(), tokenizer=None)
    suite = Suite("s", [[1, 2, 3], [4, 5, 6, 7, 8, 9], [10, 11]])
    report = report_of(target, suite, tmp_path, tiny_head(), batch_sizes=[1, 2])
    assert [row["batch_size"] for row in report["suites"]] == [1, 1, 1, 2, 2, 2]
    for row in report["suites"]:
        assert row["identical_to_greedy"]["identical"] == 3
        assert row["steps"] == report["suites"][["none", "head", "ngram"].index(row["drafter"])]["steps"]
        if row["drafter"] != "none":
            assert row["rows_busy"] == 1 if row["batch_size"] == 1 else 0 < row["rows_busy"] <= 1
            cost = row["cost"]["verify"] + row["num_speculative_tokens"] * row["cost"]["draft"]
            assert row["predicted_speedup"] == pytest.approx(row["acceptance_length"] / cost * row["rows_busy"])
    assert min(row.get("rows_busy", 1) for row in report["suites"]) < 1


def test_acceptance_by_context_equals_a_count_by_hand():
    """With a prompt of 62 and the prefill's token, the steps begin at 63, 65 and 66."""
    steps = [Step(3, 1, 2), Step(3, 0, 1), Step(3, 3, 4)]
    assert [tuple(vars(bucket).values()) for bucket in by_context([(62, steps)], None)] == [
        (0, 64, 1, 2.0, False),
        (64, 128, 2, 2.5, False),
    ]
    beyond = by_context([(62, steps)], 66)
    assert [(b.from_, b.below, b.beyond_trained_length) for b in beyond] == [
        (0, 64, False),
        (64, 66, False),
        (66, 128, True),
    ]
    assert by_context([(62, [Step(3, 2, 2)])], None) == []


def test_steps_beyond_the_trained_length_warn(tmp_path, figures_only):
    target = Target(tiny_model(), tokenizer=None)
    suite = Suite("s", [[1, 2, 3, 4] * 18])
    for trained, expected in ((78, 1), (1000, 0)):
        torch.manual_seed(1)
        config = MLPSpeculatorConfig(vocab_size=VOCAB, emb_dim=32, inner_dim=16, trained_length=trained)
        report = report_of(target, suite, tmp_path, MLPSpeculator(config), temperatures=[0.0])
        assert sum("that the head was trained on" in line for line in report["warnings"]) == expected
        for row in report["suites"]:
            assert [(each["from"], each["steps"]) for each in row["acceptance_along_answer"]] == [(0, row["steps"])]
            assert row["acceptance_by_context"][0]["from"] == 64


@pytest.mark.parametrize(("predicted", "count"), [(1.2, 1), (1.14, 0), (0.84, 1)])
def test_a_prediction_that_is_off_by_more_than_15_percent_warns(predicted, count):
    row = report_row("head", predicted_speedup=predicted, speedup={"plain": Interval(1.0)})
    assert len(warnings([row])) == count


@pytest.mark.parametrize(("cut", "count"), [(0, 0), (1, 0), (2, 1), (10, 1)])
def test_more_than_a_tenth_of_cut_answers_warns(cut, count):
    row = report_row("none", cut=cut, turns=10, max_new_tokens=9)
    assert len([line for line in warnings([row]) if f"{cut} of 10 answers reached max_new_tokens 9" in line]) == count


def test_a_report_has_several_draft_lengths_and_every_baseline(tmp_path, quick):
    target = talking_target()
    target.tokenizer.save_pretrained(tmp_path / "small")
    target.model.save_pretrained(tmp_path / "small")
    suite = Suite("s", [[1, 2, 3], [4, 5, 6]])
    report = report_of(
        target,
        suite,
        tmp_path / "out",
        lengths=[3, 1],
        draft_model=Target.load(str(tmp_path / "small")),
        baselines=["hf_assisted", "hf_prompt_lookup"],
        repeats=2,
    )
    rows = [(row["drafter"], row["num_speculative_tokens"]) for row in report["suites"]]
    # Lookup copies as many tokens as in adaptive drafting, whatever the head drafts: a shorter one would be a handicap.
    assert rows == [("none", 0), ("head", 3), ("head", 1), ("ngram", 8), ("draft_model", 3)]
    assert report["suites"][4]["acceptance_length"] == 4.0, "the target drafts for itself"
    for row in report["suites"]:
        names = {"plain", "hf_generate", "hf_assisted", "hf_prompt_lookup"}
        assert row["tokens_per_second"].keys() == {"speculative", *names}
        if row["drafter"] != "none":
            assert row["speedup"].keys() == names
        for name in names:
            assert row["time_to_first_token"][name] > 0
    assert (tmp_path / "out" / "draft_lengths.png").exists()
    assert report["settings"]["hf_assisted"]["num_assistant_tokens"] == 3
    own = (
        "num_assistant_tokens 3, num_assistant_tokens_schedule constant, assistant_confidence_threshold 0.0; all other"
    )
    assert f"- transformers assisted generation: {own} settings" in (tmp_path / "out" / "report.md").read_text()


def test_every_lookup_copies_as_many_tokens_as_in_adaptive_drafting(target_folder, monkeypatch):
    target, seen = Target.load(str(target_folder)), []
    table, _ = decoders(target, tiny_head(), [2], None, ["hf_prompt_lookup"], 1)
    found = {decoder.key: decoder for decoder in table}
    monkeypatch.setattr(target.model, "generate", lambda **how: seen.append(how) or how["input_ids"])
    found["hf_prompt_lookup"].run([[5, 6, 7]], Sampling(), 4, Timed(), [])
    assert seen[0]["prompt_lookup_num_tokens"] == 8
    assert [found[key].drafter.num_speculative_tokens for key in ("head", "ngram")] == [2, 8]


def test_assisted_generation_has_transformers_own_settings_but_for_those_that_the_report_names(
    target_folder, monkeypatch
):
    draft_model = Target.load(str(target_folder))
    own = AutoModelForCausalLM.from_pretrained(target_folder)
    table, _ = decoders(draft_model, None, [3], draft_model, ["hf_assisted"], 1)
    (assisted,) = (decoder for decoder in table if decoder.key == "hf_assisted")
    seen = []
    monkeypatch.setattr(draft_model.model, "generate", lambda **how: seen.append(how) or how["input_ids"])
    assisted.run([[5, 6, 7]], Sampling(), 4, Timed(), [])
    assistant, named = seen[0].pop("assistant_model"), assisted_settings(3)
    found, default = (each.generation_config.to_dict() for each in (assistant, own))
    assert {name: value for name, value in found.items() if value != default.get(name)} == named
    assert assistant.config._attn_implementation == own.config._attn_implementation
    plain = {"do_sample", "input_ids", "attention_mask", "max_new_tokens", "use_cache", "pad_token_id", "streamer"}
    assert seen[0].keys() - plain == named.keys()


def test_a_baseline_that_cannot_run_is_named(tmp_path, monkeypatch, quick):
    target = Target(tiny_model(), tokenizer=None)
    suite = Suite("s", [[1, 2, 3], [4, 5, 6]])

    def without_compiler(*args, **kwargs):
        if "compile_config" in kwargs:
            raise RuntimeError("no compiler here")
        time_transformers(*args, **kwargs)

    monkeypatch.setattr("eval.decoders.time_transformers", without_compiler)
    baselines = ["hf_compiled", "hf_prompt_lookup", "hf_assisted"]
    report = report_of(target, suite, tmp_path, tiny_head(), baselines=baselines, batch_sizes=[2])
    assert report["not_run"] == {
        "transformers generate, static cache, compiled": "RuntimeError: no compiler here",
        "transformers prompt lookup": "transformers supports it at batch size 1 only",
        "transformers assisted generation": "it needs a draft model",
    }
    assert "no compiler here" in (tmp_path / "report.md").read_text()


@pytest.fixture
def compiled(monkeypatch, quick):
    """The lengths of the prompts of each batch that is decoded compiled; they are decoded as usual."""
    lengths = []

    def noting(*args, **kwargs):
        if "compile_config" in kwargs:
            lengths.append(sorted(map(len, args[1])))
        time_transformers(*args, **{name: value for name, value in kwargs.items() if name != "compile_config"})

    monkeypatch.setattr("eval.decoders.time_transformers", noting)
    return lengths


def test_a_compiled_baseline_is_warmed_up_at_each_batch_size_with_the_longest_prompts(tmp_path, compiled):
    suite = Suite("s", [[1] * size for size in (2, 3, 1, 6, 5)])
    target = Target(tiny_model(), tokenizer=None)
    report_of(target, suite, tmp_path, tiny_head(), baselines=["hf_compiled"], batch_sizes=[2])
    assert compiled[:4] == [[1, 6], [5], [1, 6], [5]]


def test_a_compiled_baseline_is_warmed_up_with_the_longest_turn_that_can_come(tmp_path, compiled, figures_only):
    target = talking_target()
    rows = [("a", ["one two"]), ("a", ["three", "four five six"])]
    suite = load_suite(questions(tmp_path, *rows), target, prompt_tokens=8, max_prompts=9, max_new_tokens=16)
    report_of(target, suite, tmp_path / "out", baselines=["hf_compiled"])
    *warming, first, second, third = (length for batch in compiled for length in batch)
    assert min(warming) == max(first, second, third)
    assert max(first, second, third) > max(map(len, suite.prompts)) + 16


STEPS = [Step(3, 3, 4), Step(3, 1, 2), Step(3, 0, 1), Step(2, 2, 3), Step(3, 3, 2)]


def test_acceptance_equals_that_counted_by_hand():
    """The last step was cut, so four count: they accept 3, 1, 0 and 2 tokens."""
    found = Acceptance.of(STEPS)
    assert (found.steps, found.accepted, found.length) == (4, 6, 1 + 6 / 4)
    rates = found.rates(4)
    assert rates == [3 / 4, 2 / 3, 1 / 2, 0]
    assert 1 + sum(math.prod(rates[: i + 1]) for i in range(4)) == found.length
    assert (found.per_position(2), found.by_length(4)) == ([3, 2], [1, 1, 1, 1, 0])
    assert Acceptance.of(STEPS, cut=True) - found == Acceptance.of(STEPS[-1:], cut=True)
    assert sum((Acceptance.of([step]) for step in STEPS), Acceptance()) == found
    assert (Acceptance().length, Acceptance().rates(2)) == (1, [0, 0])


def test_validation_answers_end_at_eos(target):
    head, prompts, count = tiny_head(), [[1, 2, 3, 4], [5, 6, 7, 8]], 24
    texts = generate(target, None, prompts, max_new_tokens=count, eos_token_ids=()).tokens
    end = texts[0][7]
    target.model.generation_config.eos_token_id = end

    def expected(eos) -> float:
        drafter = HeadDrafter(head)
        made = generate(target, drafter, prompts, Sampling(), max_new_tokens=count, eos_token_ids=eos)
        steps = [step for row in made.steps for step in row]
        return len(steps), made.acceptance_length

    assert expected({end})[0] < expected(())[0]
    assert real_acceptance(target, head, Suite("s", prompts), 0, count)["acceptance_length"] == expected({end})[1]


def test_the_interval_of_a_mean_is_close_to_that_of_its_standard_error():
    """For the mean of 400 normal samples the interval is close to 1.96 standard errors."""
    generator = random.Random(1)
    samples = [generator.gauss(5, 2) for _ in range(400)]
    error = 1.96 * statistics.stdev(samples) / 20
    interval = paired_bootstrap(samples, statistics.fmean)
    assert interval.value == statistics.fmean(samples)
    assert interval.low == pytest.approx(interval.value - error, abs=0.1 * error)
    assert interval.high == pytest.approx(interval.value + error, abs=0.1 * error)


def test_a_bootstrap_draws_both_figures_of_a_prompt_together():
    """The prompts differ a hundredfold, the two decoders always by a factor of 2, so the interval has no width."""
    samples = [(2.0 * 10**k, 10.0**k) for k in (0, 1, 2) for _ in range(5)]
    interval = paired_bootstrap(samples, lambda pairs: sum(a for a, _ in pairs) / sum(b for _, b in pairs))
    assert interval == Interval(2.0, 2.0, 2.0)


def test_costs_are_measured_on_full_batches(monkeypatch):
    """12 prompts make a batch of 8, which is measured, and one of 4, which is not."""
    rows = []
    monkeypatch.setattr(
        "eval.decoders.paired_steps", lambda target, drafter, prompts, *_: rows.append(len(prompts)) or []
    )
    target = Target(tiny_model(), tokenizer=None)
    suite = Suite("s", [[i, i + 1, i + 2] for i in range(1, 13)])
    table = decoders(target, tiny_head(), [2], None, (), 8, {})[0]
    measure_suite(target, [decoder for decoder in table if decoder.ours], suite, Sampling(), 6, batch_size=8)
    assert rows
    assert set(rows) == {8}
