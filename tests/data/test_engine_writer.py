"""Generated rows: their distribution, their order, and the same rows after any interruption."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import tiny_head, tiny_model
from datasets import load_from_disk
from enumeration import chi_square_p, joint_distribution
from filelock import FileLock
from kills import Killed, killed_at
from replays import Double, capturing
from written import writing_of

from data import batches
from data.__main__ import main
from data.writers import engine as engine_writer
from data.writers.engine import EngineWriter
from data.writing import Writing
from speculator import Engine, HeadDrafter, Sampling, Target, UserError, generate
from speculator.acceptance import Acceptance
from speculator.drafters.adaptive import AdaptiveDrafter
from speculator.drafters.costs import CostEntry, CostTable
from speculator.drafters.tuning import choices_of, untuned
from speculator.heads import MLPSpeculator, MLPSpeculatorConfig
from speculator.kernels.cuda_graphs import Captured
from speculator.prompts import Conversation

ROOT = Path(__file__).parents[2]
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [3, 1], [9] * 7, [2, 2], [8, 7, 6]]


def made(target, folder, **changes) -> list[dict]:
    settings = {"max_new_tokens": 12, "batch_size": 2, "drafter": HeadDrafter(tiny_head()), **changes}
    prompts = list(map(Conversation, settings.pop("prompts", PROMPTS)))
    writing = writing_of(settings)
    return list(EngineWriter(target, **settings).write(prompts, folder, writing))


def test_rows_are_prompts_with_their_own_continuations_in_their_order(target, tmp_path):
    rows = made(target, tmp_path / "out", seed=5)
    for index, (row, prompt) in enumerate(zip(rows, PROMPTS, strict=True)):
        own = Sampling(1.0, seed=5 + index)
        alone = generate(target, HeadDrafter(tiny_head()), [prompt], own, max_new_tokens=12).tokens[0]
        assert row["input_ids"] == [*prompt, *alone]
        assert row["loss_mask"] == [0] * len(prompt) + [1] * len(alone)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"rows", "manifest.json"}


def test_rows_share_several_distributions(target, tmp_path):
    both = Writing(samplings=(Sampling(0.0), Sampling(1.0)), seed=5)
    rows = made(target, tmp_path / "out", samplings=both.samplings, seed=5, batch_size=4)
    for index, (row, prompt) in enumerate(zip(rows, PROMPTS, strict=True)):
        own = both.sampling(index, len(PROMPTS))
        alone = generate(target, HeadDrafter(tiny_head()), [prompt], own, max_new_tokens=12).tokens[0]
        assert row["input_ids"] == [*prompt, *alone]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert [expected["temperature"] for expected in manifest["sampling"]] == [0.0, 1.0]
    with pytest.raises(UserError, match="sampling"):
        made(target, tmp_path / "out", samplings=(Sampling(1.0),), seed=5, batch_size=4)


@pytest.mark.parametrize("step", [1, 2, 3, 20])
@pytest.mark.parametrize("first", [0, 1, 19])
def test_rows_at_equal_distances_share_the_temperatures(step, first):
    """Sources take turns, and every twentieth row is held out: no such rows may have one temperature alone."""
    temperatures = 0.0, 0.7, 1.0
    for count in (2, 3):
        writing = Writing(samplings=tuple(map(Sampling, temperatures[:count])), seed=3)
        taken = [writing.sampling(row, 9999) for row in range(first, first + 600 * step, step)]
        shares = Counter(each.temperature for each in taken)
        assert len(shares) == count
        assert max(shares.values()) < 1.3 * min(shares.values())
        assert [each.seed for each in taken[:2]] == [3 + first, 3 + first + step]


def test_a_row_ends_with_eos_and_keeps_it(target, tmp_path):
    target.model.generation_config.eos_token_id = 3
    ends = [row["input_ids"][len(prompt) :] for row, prompt in zip(made(target, tmp_path), PROMPTS, strict=True)]
    assert any(len(end) < 12 for end in ends)
    for end in ends:
        assert 3 not in end[:-1]
        assert end[-1] == 3 or len(end) == 12


def test_the_manifest_records_settings_and_speed(target, tmp_path):
    # A lone batch is clocked too.
    rows = made(target, tmp_path, samplings=(Sampling(0.8, top_k=9),), seed=2, batch_size=7)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["rows"] == len(PROMPTS)
    assert manifest["tokens"] == sum(sum(row["loss_mask"]) for row in rows)
    assert manifest["sampling"] == {"temperature": 0.8, "top_k": 9, "top_p": 1.0, "min_p": 0.0}
    assert manifest["seed"] == 2
    assert manifest["acceptance_length"] >= 1
    assert all(manifest["tokens_per_second"][name] > 0 for name in ("speculative", "plain"))
    made(target, tmp_path / "plain", drafter=None)
    plain = json.loads((tmp_path / "plain" / "manifest.json").read_text())
    assert "max_prompt_tokens" not in plain
    writer = EngineWriter(target, batch_size=2)
    writer.write(list(map(Conversation, PROMPTS)), tmp_path / "short", Writing(max_new_tokens=9), max_prompt_tokens=20)
    assert json.loads((tmp_path / "short" / "manifest.json").read_text())["max_prompt_tokens"] == 20
    assert plain["tokens_per_second"]["speculative"] is None
    assert plain["tokens_per_second"]["plain"] > 0
    assert plain["acceptance_length"] == 1


def test_steps_that_the_end_has_cut_are_not_in_the_acceptance_length(target, tmp_path):
    made(target, tmp_path, max_new_tokens=3, batch_size=7)
    samplings = [Sampling(1.0, seed=row) for row in range(len(PROMPTS))]
    whole = generate(target, HeadDrafter(tiny_head()), PROMPTS, samplings, max_new_tokens=3, max_batch_size=7)
    steps = [step for row in whole.steps for step in row]
    assert any(step.cut for step in steps)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["acceptance_length"] == pytest.approx(Acceptance.of(steps).length)


def test_speeds_are_those_of_runs_that_captured_nothing(target, tmp_path, monkeypatch):
    capturing(monkeypatch, Double)
    answer, runs = engine_writer._answer, []

    def noting(engine, *given, **how):
        before, decoding = Captured.prepared, engine.decode_seconds
        done = answer(engine, *given, **how)
        speed = sum(len(each.tokens) - 1 for each in done) / (engine.decode_seconds - decoding)
        runs.append(speed if Captured.prepared == before else None)
        return done

    monkeypatch.setattr(engine_writer, "_answer", noting)
    made(target, tmp_path, prompts=PROMPTS[:2])
    assert Double.made
    speeds = json.loads((tmp_path / "manifest.json").read_text())["tokens_per_second"]
    timed = [speed for speed in runs[:-1] if speed]  # the last run makes the rows
    assert [speeds["speculative"], speeds["plain"]] == pytest.approx(timed[-2:])


def test_a_finished_folder_is_not_generated_again(target, tmp_path, monkeypatch):
    rows = made(target, tmp_path)
    monkeypatch.setattr(Engine, "step", None)
    assert made(target, tmp_path) == rows


def test_a_prompt_whose_logits_are_not_finite_is_left_out(target, tmp_path, capsys):
    prompts = [[1, 2, 3], [4], [30] * 5, [3, 1]]
    rows = made(target, tmp_path / "finite", prompts=prompts)
    bad = next(token for token in range(32) if not any(token in row["input_ids"] for row in rows))
    target.model.get_input_embeddings().weight.data[bad] = torch.nan
    prompts[2] = [bad] * 5
    assert made(target, tmp_path / "out", prompts=prompts) == [rows[0], rows[1], rows[3]]
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["skipped"] == 1
    assert "1 of 4 prompts end before an answer that failed" in capsys.readouterr().err


def test_a_folder_that_another_run_is_writing_is_an_error(target, tmp_path):
    rows = made(target, tmp_path / "whole")
    with killed_at(batches.Batches, "_save"):
        made(target, tmp_path / "out")
    with FileLock(tmp_path / "out" / "batches" / "lock"), pytest.raises(UserError, match="another run is writing it"):
        made(target, tmp_path / "out")
    assert made(target, tmp_path / "out") == rows


def test_a_run_killed_at_any_write_resumes_to_the_same_rows(target, tmp_path, monkeypatch):
    """Each rename and each removal of a folder in turn is where the process ends: just before it, or just after."""
    monkeypatch.setattr(EngineWriter, "batch_slots", 1)
    expected = made(target, tmp_path / "whole", max_new_tokens=3)
    moments = 0
    while True:
        folder, left = tmp_path / f"cut{moments}", [moments]

        def ending(original, left=left):
            def call(*args, **kwargs):
                for act in (lambda: None, lambda: original(*args, **kwargs)):
                    act()
                    left[0] -= 1
                    if left[0] < 0:
                        raise Killed

            return call

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", ending(Path.replace))
            patch.setattr(batches.shutil, "rmtree", ending(batches.shutil.rmtree))
            try:
                assert made(target, folder, max_new_tokens=3) == expected
                break  # nothing was left to cut
            except Killed:
                pass
        assert made(target, folder, max_new_tokens=3) == expected
        assert {path.name for path in folder.iterdir()} == {"rows", "manifest.json"}
        moments += 1
    assert moments > 2 * (4 + 2)  # four pieces, the rows, the manifest


def adaptive(head_cost: float, level_cost: float) -> AdaptiveDrafter:
    """An adaptive drafter whose head costs this much, and this much for each level."""
    head = tiny_head()
    table = CostTable([CostEntry(rows=2, greedy=False, head=head_cost, path=0.0, level=level_cost, token=0.02)])
    return AdaptiveDrafter(head, choices_of(head, untuned(head)), dict.fromkeys((True, False), (0.1,)), table)


def test_a_killed_run_resumes_with_the_costs_that_it_began_with(target, tmp_path, monkeypatch):
    monkeypatch.setattr(EngineWriter, "batch_slots", 1)
    expected = made(target, tmp_path / "whole", drafter=adaptive(0.1, 0.05))
    with killed_at(batches.Batches, "write", call=2):
        made(target, tmp_path / "cut", drafter=adaptive(0.1, 0.05))
    assert made(target, tmp_path / "cut", drafter=adaptive(0.1, 4.0)) == expected
    assert made(target, tmp_path / "other", drafter=adaptive(0.1, 4.0)) == expected, "no draft changes the rows"
    record = json.loads((tmp_path / "cut" / "manifest.json").read_text())
    assert record["drafter"].startswith("head, adaptive")
    assert record["costs"] == json.loads((tmp_path / "whole" / "manifest.json").read_text())["costs"]


def test_a_resumed_run_may_decode_another_number_of_rows_together(target, tmp_path):
    expected = made(target, tmp_path / "whole", batch_size=1)
    with killed_at(batches.Batches, "write", call=1):
        made(target, tmp_path / "cut", batch_size=1)
    assert made(target, tmp_path / "cut", batch_size=4) == expected
    assert json.loads((tmp_path / "cut" / "manifest.json").read_text())["batch_size"] == 1


def test_a_finished_piece_is_not_generated_again(target, tmp_path, monkeypatch):
    monkeypatch.setattr(EngineWriter, "batch_slots", 1)
    with killed_at(batches.Batches, "write", call=1):
        made(target, tmp_path)
    first, second = sorted((tmp_path / "batches").glob("0*.json"))[0], tmp_path / "batches" / "000001.json"
    assert not second.exists()
    record, written = json.loads((first.parent / "record.json").read_text()), json.loads(first.read_text())
    work = batches.Batches(tmp_path, record, [[]])
    with work:
        changed = {"input_ids": [*[9] * 7, 30, 31], "loss_mask": [0] * 7 + [1] * 2}
        work.write(0, **{**written, "rows": [[changed], *written["rows"][1:]]})
    longest = PROMPTS.index([9] * 7)
    assert made(target, tmp_path)[longest]["input_ids"] == [9] * 7 + [30, 31]


def test_an_error_before_the_first_batch_is_told_though_the_folder_holds_more(tmp_path):
    work = batches.Batches(tmp_path, {}, [[0]])
    work.begin()
    (tmp_path / "rows").mkdir()  # as of a save that was killed
    work.__exit__()
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


def test_a_damaged_finished_folder_is_an_error(target, tmp_path):
    made(target, tmp_path)
    file = tmp_path / "rows" / "data-00000-of-00001.arrow"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(UserError, match="checksum"):
        made(target, tmp_path)


@pytest.fixture
def command(target_folder, text_file, tmp_path, monkeypatch):
    """The command line of a run of some batches, into a folder."""
    head = tmp_path / "head"
    torch.manual_seed(1)
    MLPSpeculator(MLPSpeculatorConfig(vocab_size=300, emb_dim=32, inner_dim=16, n_predict=3)).save_pretrained(head)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def build(output: Path, processes: int = 1) -> list[str]:
        flags = {"target": target_folder, "speculator": head, "sources": text_file, "output": output}
        flags |= {
            "prompt_tokens": 8,
            "max_rows": 60,
            "max_new_tokens": 100,
            "batch_size": 2,
            "num_speculative_tokens": 3,
        }
        launcher = [sys.executable]
        if processes > 1:
            launcher += ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--rdzv-backend", "c10d"]
            launcher += ["--rdzv-endpoint", "localhost:0"]
        return [*launcher, "-m", "data", "generate", *(str(w) for k, v in flags.items() for w in (f"--{k}", v))]

    return build


def rows_of(folder: Path) -> list[dict]:
    return list(load_from_disk(folder / "rows"))


@pytest.mark.soak
def test_a_killed_run_resumed_by_two_processes_gives_the_same_rows(command, tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = subprocess.Popen(command(killed), cwd=ROOT, stderr=subprocess.DEVNULL)
    while len(list((killed / "batches").glob("0*.json"))) < 3:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (killed / "manifest.json").exists()
    process = subprocess.Popen(command(killed, processes=2), cwd=ROOT, stderr=subprocess.PIPE, text=True)

    assert main(command(whole)[3:]) == 0
    assert process.wait() == 0, process.stderr.read()
    assert rows_of(killed) == rows_of(whole)
    assert len(rows_of(whole)) == 60


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"seed": 1}, "seed"),
        ({"samplings": (Sampling(0.5),)}, "sampling"),
        ({"prompts": [[1], *PROMPTS[1:]]}, "prompts"),
        ({"drafter": HeadDrafter(tiny_head(), 2)}, "drafter"),
    ],
)
@pytest.mark.parametrize("finished", [True, False])
def test_other_settings_in_the_same_folder_are_an_error(target, tmp_path, changes, first, finished):
    made(target, tmp_path)
    if not finished:
        (tmp_path / "batches").mkdir()
        (tmp_path / "manifest.json").rename(tmp_path / "batches" / "record.json")
    with pytest.raises(UserError, match=f"was made with {first}"):
        made(target, tmp_path, **changes)


def test_another_head_in_the_same_folder_is_an_error(target, tmp_path):
    made(target, tmp_path)
    head = tiny_head()
    with torch.no_grad():
        next(head.parameters())[0, 0] += 1
    with pytest.raises(UserError, match="drafter"):
        made(target, tmp_path, drafter=HeadDrafter(head))


@pytest.mark.parametrize(
    ("prompts", "message"), [([], "no prompt"), ([[1], []], "prompt 2 is empty"), ([[1] * 128], "prompt 1")]
)
def test_prompts_that_cannot_be_continued_write_nothing(target, tmp_path, prompts, message):
    with pytest.raises(UserError, match=message):
        made(target, tmp_path / "out", prompts=prompts)
    assert not (tmp_path / "out").exists()


# ---- the distribution


def p_value_of_text(folder, temperature: float) -> float:
    """Of the second to fourth new token jointly: those that drafts decide (the prefill gives the first)."""
    model, prompt, rows = tiny_model(), [1, 2, 3, 4, 5], 2_500
    expected: dict[tuple[int, ...], float] = Counter()
    for tokens, probability in joint_distribution(model, prompt, 3, Sampling(1.0)).items():
        expected[tokens[1:]] += probability
    writer = EngineWriter(Target(model, None), HeadDrafter(tiny_head()), 1024)
    writing = Writing(samplings=(Sampling(temperature),), max_new_tokens=3)
    made = writer.write([Conversation(prompt)] * rows, folder, writing)
    return chi_square_p(Counter(tuple(ids[-2:]) for ids in made["input_ids"]), expected, rows)


def test_the_text_follows_the_targets_enumerated_distribution(tmp_path):
    assert p_value_of_text(tmp_path / "as asked", temperature=1.0) > 1e-4
    assert p_value_of_text(tmp_path / "colder", temperature=0.7) < 1e-6
