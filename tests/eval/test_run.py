"""`python -m eval`: report files, what the head drafts, and measurements that notice slow or wrong decoding."""

import json
import re
import sys
import time
from types import SimpleNamespace

import pytest
from conftest import VOCAB, exit_code, measured, tiny_head, tiny_model, write_tuning
from filelock import FileLock

from eval import decoders
from eval.__main__ import main
from eval.as_server import default_lengths, server_decoders, server_log
from eval.metrics import speedup, spread
from eval.report import UNFINISHED, markdown
from eval.run import render
from eval.suites import FILTERS, Suite, load_suite
from eval.timing import Decoded, Timed, time_ours, time_transformers
from speculator import HeadDrafter, MLPSpeculator, MLPSpeculatorConfig, Sampling, Target, UserError, generate
from speculator.checkpoints import card
from speculator.decoding.request import Step
from speculator.drafters.tuning import PROMPT_HASHES
from speculator.report import SCHEMA, Interval, ServerLog, as_json, read_report
from speculator.tables import shown
from speculator.verdict import headlines

SUITE = Suite("test text", [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]])


def report_of(tmp_path, target=None, head=None, **more):
    target = target or Target(tiny_model(), tokenizer=None)
    options = {"temperatures": [0.0, 1.0], "max_new_tokens": 16, "speculator_name": "test", **more}
    return measured(target, head or tiny_head(), [SUITE], tmp_path, **options)


def test_report_files_agree_and_rows_have_the_keys_that_scripts_read(tmp_path, quick):
    report = report_of(tmp_path)
    assert json.loads((tmp_path / "report.json").read_text()) == report
    text = (tmp_path / "report.md").read_text()
    for label in ("draft head", "n-gram lookup", "plain decoding", "transformers generate"):
        assert f"| {label} |" in text
    assert (tmp_path / "acceptance.png").stat().st_size > 10_000
    made = read_report(tmp_path / "report.json")
    assert as_json(made) == report
    assert markdown(made) == text
    assert report["schema"] == SCHEMA
    row = next(row for row in report["suites"] if row["drafter"] == "head" and row["temperature"] == 0)
    assert row["cost"].keys() == {"draft", "verify"}
    assert row["speedup"].keys() == {"plain", "hf_generate"}
    assert row["speedup"]["plain"].keys() == {"value", "low", "high"}
    whole, speed = row["end_to_end_speedup"], row["end_to_end_tokens_per_second"]
    assert {name: each["value"] for name, each in whole.items()} == pytest.approx(
        {name: speed["speculative"] / speed[name] for name in ("plain", "hf_generate")}
    )
    plain = Interval(**whole["plain"])
    assert f"| {shown(plain)} |" in text
    assert f"| {card._with_interval(plain)} |" in card._results(made.suites)
    assert f"{shown(plain)} with the prefill" in headlines(made)[0]
    assert shown(plain) in (tmp_path / "report.html").read_text()
    totals = [sum(column) for column in zip(*row["samples"], strict=True)]
    assert whole["plain"]["value"] == pytest.approx(totals[0] / totals[1] / (totals[2] / totals[3]))
    assert (row["accepted_per_step"], row["steps"]) == (pytest.approx(totals[4] / totals[5]), totals[5])
    assert row["identical_to_greedy"] == {"identical": 3, "of": 3, "dtype": "float32"}
    assert report["fingerprints"].keys() == {"target", "speculator"}
    assert report["argv"] == sys.argv
    assert {"date", "git_commit"} <= report.keys()
    assert "speculator" in report["versions"]
    assert row["predicted_speedup"] == pytest.approx(
        row["acceptance_length"] / (3 * row["cost"]["draft"] + row["cost"]["verify"])
    )


def test_the_head_drafts_as_tuned_at_each_temperature(tmp_path, quick, monkeypatch):
    # Chains of 1 and 2 and the tree yield 1.6, 1.9 and 2 tokens, and cost 1.2, 1.4 and 1.4 plain steps. The chain of 1
    # is within 3% of that of 2, and not of the tree.
    costs = [
        {"rows": 1, "greedy": greedy, "head": 0.0, "path": 0.0, "level": 0.2, "token": 0.0} for greedy in (True, False)
    ]
    write_tuning(tmp_path, trees={"greedy": [[[0], [1], [0, 0]]], "sampled": []}, costs=costs)

    def drafted(**more) -> dict[float, tuple[int, int]]:
        rows = report_of(tmp_path, tuned_in=tmp_path, max_new_tokens=8, **more)["suites"]
        return {
            row["temperature"]: (row["nodes"], row["num_speculative_tokens"])
            for row in rows
            if row["drafter"] == "head"
        }

    assert drafted() == {0.0: (3, 2), 1.0: (1, 1)}
    text = (tmp_path / "report.md").read_text()
    assert "| draft head, tree of 3 |" in text
    assert not (tmp_path / "draft_lengths.png").exists(), "the depths are not side by side"
    monkeypatch.setattr("eval.run.render", lambda *_: None)
    assert drafted(lengths=[1]) == {0.0: (1, 1), 1.0: (1, 1)}


def test_the_head_drafts_a_chain_that_adaptive_drafting_on_a_gpu_lacks(tmp_path, figures_only, monkeypatch):
    """Chains of 1 to 5 yield 1.57, 1.83, 1.91, 1.91 and 1.90 tokens per plain step; a GPU has graphs of 1, 2 and 5."""
    monkeypatch.setattr("speculator.drafters.tuning.cuda_graphs", SimpleNamespace(DEVICES=("cpu",)))
    costs = [{"rows": 1, "greedy": True, "head": 0.0, "path": 0.0, "level": 0.02, "token": 0.0}]
    write_tuning(tmp_path, n_predict=5, costs=costs)
    rows = report_of(tmp_path, head=tiny_head(5), tuned_in=tmp_path, temperatures=[0.0], max_new_tokens=8)["suites"]
    assert [row["nodes"] for row in rows if row["drafter"] == "head"] == [3], "the shortest within 3% of the fastest"


def test_an_attention_head_drafts_deeper_than_it_was_trained(tmp_path, figures_only):
    head = tiny_head(architecture="eagle3")
    rows = report_of(tmp_path, head=head, temperatures=[0.0], lengths=[5])["suites"]
    assert head.n_predict < 5
    assert [row["nodes"] for row in rows if row["drafter"] == "head"] == [5]
    with pytest.raises(UserError, match="at most 3"):
        report_of(tmp_path, lengths=[5])


def test_num_speculative_tokens_overrides_the_tuned_draft(target_folder, text_file, tmp_path, figures_only):
    head, out = tmp_path / "head", tmp_path / "out"
    MLPSpeculator(MLPSpeculatorConfig(vocab_size=300, emb_dim=32, inner_dim=8)).save_pretrained(head)
    write_tuning(head)
    command = ["--target", str(target_folder), "--speculator", str(head), "--suite", str(text_file)]
    sizes = ["--prompt_tokens", "8", "--max_new_tokens", "4", "--max_prompts", "1", "--temperature", "0"]

    def drafted(*flags) -> int:
        assert main([*command, *sizes, "--output", str(out), *flags]) == 0
        (row,) = (row for row in json.loads((out / "report.json").read_text())["suites"] if row["drafter"] == "head")
        return row["nodes"]

    assert drafted() == 2
    (head / "decoding.json").write_text("not read")
    assert drafted("--num_speculative_tokens", "1") == 1


def test_rule_applies_to_every_drafter_that_supports_it(target_folder, text_file, tmp_path, capsys, figures_only):
    head, out = tmp_path / "head", tmp_path / "out"
    MLPSpeculator(MLPSpeculatorConfig(vocab_size=300, emb_dim=32, inner_dim=8)).save_pretrained(head)
    command = ["--target", str(target_folder), "--speculator", str(head), "--suite", str(text_file)]
    sizes = ["--prompt_tokens", "8", "--max_new_tokens", "8", "--max_prompts", "1", "--temperature", "1"]

    def rules(*flags) -> dict[str, str]:
        assert main([*command, *sizes, "--output", str(out), *flags]) == 0
        rows = json.loads((out / "report.json").read_text())["suites"]
        return {row["drafter"]: row["rule"] for row in rows}

    own = {"none": "plain", "head": "match", "ngram": "match"}
    assert rules() == own | {"adaptive": "match"}
    assert rules("--rule", "rejection") == own | {"head": "rejection", "ngram": "rejection"}
    capsys.readouterr()
    assert exit_code(main, [*command, "--output", str(out), "--rule", "multi_candidate"]) == 2
    assert "invalid choice: 'multi_candidate'" in capsys.readouterr().err


def test_the_counters_of_a_server_include_the_steps_in_which_texts_end(tmp_path, figures_only):
    texts = [[Step(2, 2, 3), Step(2, 0, 1)], [Step(2, 1, 2), Step(2, 2, 1)]]  # the last step had room for one token
    assert server_log(
        Timed([Decoded(tokens=[[], []], prefill_tokens=2, prefill_seconds=0.0, decode_seconds=1.0, steps=texts)]), 2
    ) == ServerLog(drafts=4, drafted_tokens=8, accepted_per_position=[3, 2], mean_acceptance_length=2.25)
    rows = report_of(tmp_path, temperatures=[0.0], server="vllm")["suites"]
    assert [row["drafter"] for row in rows] == ["none", "head"]
    assert rows[1]["server_log"]["drafts"] >= rows[1]["steps"]


def test_servers_draft_the_likeliest_tokens_unless_a_rule_is_named():
    target, head = Target(tiny_model(), tokenizer=None), tiny_head()

    def drafted(rule):
        decoder = server_decoders(target, head, [2], {}, rule)[1]
        return decoder.drafter.shape.sampled, decoder.rule

    assert [drafted(rule) for rule in (None, "rejection", "block")] == [
        (False, None),
        (True, "rejection"),
        (True, "block"),
    ]


def test_sglang_drafts_a_tree_for_llama_and_three_tokens_else():
    head = tiny_head(n_predict=5)
    other = SimpleNamespace(config=SimpleNamespace(model_type="qwen2"))
    assert default_lengths("sglang", head, other) == [3]
    assert default_lengths("vllm", head, other) == []
    with pytest.raises(UserError, match="a tree for this target"):
        default_lengths("sglang", head, Target(tiny_model(), tokenizer=None))


def test_the_filters_of_sampling_reach_every_decoder_and_the_report(
    target_folder, text_file, tmp_path, monkeypatch, figures_only
):
    seen = []

    def decoded(target, drafter, prompts, sampling, *others, **more):
        seen.append(sampling)
        return time_ours(target, drafter, prompts, sampling, *others, **more)

    monkeypatch.setattr("eval.decoders.time_ours", decoded)
    tiny_head(vocab_size=300).save_pretrained(tmp_path / "head")
    command = ["--target", str(target_folder), "--speculator", str(tmp_path / "head"), "--suite", str(text_file)]
    sizes = ["--prompt_tokens", "8", "--max_new_tokens", "8", "--max_prompts", "2", "--temperature", "0.8"]
    filters = ["--top_k", "1", "--top_p", "0.9", "--min_p", "0.1"]
    assert main([*command, *sizes, *filters, "--output", str(tmp_path / "out")]) == 0
    assert {(each.top_k, each.top_p, each.min_p) for each in seen} == {(1, 0.9, 0.1)}
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert {name: report["settings"][name] for name in FILTERS} == {"top_k": 1, "top_p": 0.9, "min_p": 0.1}
    texts = {}
    for name in ("ours", "transformers"):
        timed, target = Timed(), Target.load(str(target_folder))
        given = [target, [[5, 6, 7, 8]], Sampling(1.0, top_k=1), 8, timed]
        time_ours(given[0], None, *given[1:], {}) if name == "ours" else time_transformers(*given)
        texts[name] = timed.tokens
    assert texts["ours"] == texts["transformers"], "of one token there is no choice"
    assert exit_code(main, [*command, "--top_p", "2", "--output", str(tmp_path / "none")]) == 2


def test_prompts_that_the_head_was_tuned_on_are_a_warning_and_tune_reads_others(
    target_folder, tmp_path, monkeypatch, figures_only
):
    """By default `tune` and `eval` both read python-sources, of which they take different splits."""
    tiny_head(vocab_size=300).save_pretrained(tmp_path / "head")
    monkeypatch.setattr("eval.tune._with_costs", lambda target, head, tuning: (tuning, []))
    command = ["--target", str(target_folder), "--speculator", str(tmp_path / "head")]
    sizes = ["--prompt_tokens", "8", "--max_new_tokens", "8", "--max_prompts", "3"]
    assert main(["tune", *command, *sizes]) == 0
    tuned = tmp_path / "head" / "decoding.json"
    assert json.loads(tuned.read_text())["suite"] == "python-sources (validation)"
    text = tmp_path / "text.txt"
    text.write_text("".join(f"number {n} of {n * n}\n" for n in range(3000)))
    rows = json.loads(tuned.read_text())
    seen = load_suite(
        str(text), Target.load(str(target_folder)), prompt_tokens=8, max_prompts=2, max_new_tokens=8
    ).prompt_hashes
    own = {"greedy": [[0.6]] * 3, "sampled": [[0.6]] * 3}
    rows |= {"acceptance": own, "costs": [], PROMPT_HASHES: seen, "trees": {"greedy": [], "sampled": []}}
    tuned.write_text(json.dumps(rows))
    monkeypatch.setattr("eval.run._tuned_tables", lambda fixed, *given: dict.fromkeys([0.0], fixed))
    asked = ["--suite", str(text), "--temperature", "0", "--output", str(tmp_path / "out")]
    assert main([*command, *sizes, *asked]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert any("text.txt: decoding.json was tuned on 2 of its 3 prompts" in line for line in report["warnings"])
    assert "decoding.json" in report["fingerprints"]


class Clock:
    """A clock that advances by a millisecond per reading."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def test_the_time_to_the_first_token_is_that_of_the_prefill_alone(target, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", Clock())
    made = generate(target, None, [[1, 2, 3]], max_new_tokens=20, eos_token_ids=())
    assert made.prefill_seconds == pytest.approx(0.001)
    assert made.decode_seconds == pytest.approx(19 * 0.001)


def test_a_slowed_drafter_is_reported_slower(tmp_path, monkeypatch, figures_only):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)

    def head_row(report):
        return next(row for row in report["suites"] if row["drafter"] == "head")

    honest = head_row(report_of(tmp_path, temperatures=[0.0]))
    propose = HeadDrafter.propose

    def slowly(self, *args):
        clock.now += 0.03
        return propose(self, *args)

    monkeypatch.setattr(HeadDrafter, "propose", slowly)
    slowed = head_row(report_of(tmp_path, temperatures=[0.0]))
    assert slowed["acceptance_length"] == honest["acceptance_length"]
    assert slowed["speedup"]["plain"]["high"] < honest["speedup"]["plain"]["low"]
    assert slowed["cost"]["draft"] > 2 * honest["cost"]["draft"]
    assert slowed["predicted_speedup"] < 0.8 * honest["predicted_speedup"]


def test_a_changed_completion_is_counted_as_not_identical(tmp_path, monkeypatch, figures_only):
    honest = decoders.time_ours

    def corrupted(target, drafter, prompts, sampling, count, out, **kwargs):
        honest(target, drafter, prompts, sampling, count, out, **kwargs)
        if isinstance(drafter, HeadDrafter) and prompts == [SUITE.prompts[1]]:
            out.tokens[-1][-1] = (out.tokens[-1][-1] + 1) % VOCAB

    monkeypatch.setattr(decoders, "time_ours", corrupted)
    rows = report_of(tmp_path, temperatures=[0.0])["suites"]
    identical = {row["drafter"]: row["identical_to_greedy"]["identical"] for row in rows}
    assert identical == {"none": 3, "head": 2, "ngram": 3}


def test_speedup_is_the_ratio_of_totals_with_its_interval():
    ours, baseline = (
        Timed([Decoded([[0] * 11], prefill_tokens=1, prefill_seconds=0.5, decode_seconds=each) for each in seconds])
        for seconds in ([1.0, 1.0], [2.0, 4.0])
    )
    ratio = speedup(ours, baseline)
    assert ratio.value == pytest.approx(3.0)
    # Resampled, the ratio is 2, 3, 3 or 4: a standard error of 0.71. With one degree of freedom t is 12.7.
    reach = 12.7 * 0.5**0.5 * 2**0.5
    assert ratio.low == pytest.approx(3 - reach, rel=0.05)
    assert ratio.high == pytest.approx(3 + reach, rel=0.05)
    whole = speedup(ours, baseline, whole=True)
    assert whole.value == pytest.approx((22 / 3) / (22 / 7))
    assert whole.low < whole.value < whole.high
    slow = Decoded([[0] * 2], prefill_tokens=1, prefill_seconds=0.5, decode_seconds=9.5)
    found = spread(Timed([*ours.batches, slow]), Timed([*baseline.batches, *ours.batches[:1]]), [0, 1, 2])
    assert vars(found) == pytest.approx(
        {"p5": 0.9 * 0.3 / 11 + 0.1 * 5 / 3, "p50": 5 / 3, "p95": 0.1 * 5 / 3 + 0.9 * 3, "slower": 1 / 3}
    )


def test_the_measurements_outlive_a_plot_that_fails(tmp_path, monkeypatch, quick):
    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr("eval.run.draw_plots", fail)
    with pytest.raises(OSError, match="space"):
        report_of(tmp_path, temperatures=[0.0])
    report = read_report(tmp_path / "report.json")
    assert len(report.suites) == 3
    monkeypatch.undo()
    render(report, [], tmp_path)
    assert (tmp_path / "report.md").exists()


def test_what_was_measured_is_kept_when_a_later_temperature_breaks_off(tmp_path, monkeypatch, figures_only):
    def breaks_off(target, table, suite, sampling, *others):
        if sampling.temperature:
            raise MemoryError("out of memory")
        return decoders.measure_suite(target, table, suite, sampling, *others)

    monkeypatch.setattr("eval.run.measure_suite", breaks_off)
    with pytest.raises(MemoryError) as raised:  # a notebook keeps it, and with it what its frames hold
        report_of(tmp_path, temperatures=[0.0, 1.0])
    kept = json.loads((tmp_path / UNFINISHED).read_text())
    assert {row["temperature"] for row in kept["suites"]} == {0.0}
    assert len(kept["suites"]) == 3
    assert not (tmp_path / "report.json").exists()
    monkeypatch.undo()
    report = report_of(tmp_path, temperatures=[0.0])
    assert raised.value
    assert not (tmp_path / UNFINISHED).exists()
    assert report.keys() == kept.keys()


@pytest.mark.parametrize("measured", [["--speculator", "none"], ["--server", "http://127.0.0.1:9"]])
def test_a_report_that_another_process_writes_is_refused_before_the_target_is_loaded(measured, tmp_path, capsys):
    with FileLock(tmp_path / ".lock"):
        assert exit_code(main, ["--target", "nobody/none", *measured, "--output", str(tmp_path)]) == 2
    assert "another process is writing this report" in capsys.readouterr().err


def test_a_baseline_that_fails_later_leaves_the_others_their_timings(tmp_path, monkeypatch, figures_only):
    def fails_late(target, prompts, *others, **more):
        if prompts[0] == SUITE.prompts[1]:
            raise RuntimeError("out of memory\nfor longer prompts")
        return time_transformers(target, prompts, *others, **more)

    monkeypatch.setattr("eval.decoders.time_transformers", fails_late)
    report = report_of(tmp_path, temperatures=[0.0])
    assert report["not_run"] == {"transformers generate": "RuntimeError: out of memory for longer prompts"}
    assert len(report["suites"]) == 3
    assert all(row["tokens_per_second"].keys() == {"plain", "speculative"} for row in report["suites"])


def test_all_lines_of_a_suite_have_the_same_columns(tmp_path, quick):
    draft = Target(tiny_model(), tokenizer=None)
    report = report_of(
        tmp_path, temperatures=[0.0], batch_sizes=[1, 2], baselines=["hf_prompt_lookup"], draft_model=draft
    )
    assert any("hf_prompt_lookup" in row["tokens_per_second"] for row in report["suites"])
    head, *lines = re.findall(r"<tr.*?</tr>", (tmp_path / "report.html").read_text().partition("<table")[2], re.DOTALL)
    assert len(lines) > 8
    assert {line.count("<td") for line in lines[:9]} == {head.count("<th")}
