"""Target states in files: a head trained from them is the one that is trained without."""

import errno
import re
import threading
import time
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import tiny_block_head, tiny_head, tiny_model
from safetensors.torch import load_file

from speculator import Target, UserError
from speculator.checkpoints.loading import bind
from speculator.kernels.compiled import can_compile
from speculator.target.fingerprint import digest
from train.loop import Loop
from train.losses import ChunkedLoss, has_rows
from train.options.config import LossConfig, StageConfig
from train.states import sources
from train.states.batch import Collator, StageRows, StateSource
from train.states.sources import KeptStates

DRAFTED = [0, 1, 3, 5, 8, 9, 12, 20, 21, 30]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path / "cache"))


def rows_of_text(count=8):
    """StageRows of unequal lengths, with two documents each."""
    generator = torch.Generator().manual_seed(0)
    lengths = [14 + i % 5 for i in range(count)]
    texts = [torch.randint(32, (n,), generator=generator).tolist() for n in lengths]
    return [{"input_ids": text, "document_ids": [0] * 6 + [1] * (len(text) - 6)} for text in texts]


def head_of(architecture, target, drafted):
    torch.manual_seed(0)
    if architecture == "dspark":
        return tiny_block_head(target, draft_tokens=drafted).float()
    return bind(tiny_head(architecture=architecture, draft_tokens=drafted), target)


def trained(target, head, rows, folder, kept=None, loss=None, steps=10):
    stage = StageConfig(
        max_steps=steps,
        learning_rate=1e-2,
        lr_scheduler_type="linear",
        warmup_steps=0,
        per_device_train_batch_size=2,
        eval_steps=5,
        logging_steps=1,
    )
    source = kept or StateSource(target, head.aux_layers)
    collate = Collator(head.config, documents=source.reads_documents)
    loop = Loop(head, source, stage, loss or LossConfig(), StageRows(rows, collate, validation=rows[:2]), folder)
    figures = [
        [value for name, value in entry.items() if "loss" in name or "/" in name or "forecast" in name]
        for entry in loop.run().log_history
    ]
    return [weight.detach().clone() for weight in head.parameters()], figures


def taken(kept, batch):
    """Return the states of a batch, whose files are written then."""
    found = kept.take(*kept.over([batch]))
    kept.files.wait()
    return found


def counted(target):
    """Count the rows that a target reads."""
    read, compute = [], target.training_states

    def states(tokens, *given):
        read.append(len(tokens))
        return compute(tokens, *given)

    target.training_states = states
    return read


TRAINED = [("mlp", family, drafted) for family in ("llama", "gemma2") for drafted in (None, DRAFTED)]
TRAINED += [("eagle3", "gemma2", DRAFTED), ("eagle3", "llama", None)]
TRAINED += [("dspark", "llama", DRAFTED)]


@pytest.mark.parametrize(
    ("architecture", "family", "drafted"),
    [
        pytest.param(*case, marks=[pytest.mark.soak] * (case not in TRAINED))
        for case in product(("mlp", "eagle3", "dspark"), ("llama", "gemma2"), (None, DRAFTED))
    ],
    ids=lambda value: value if isinstance(value, str) else "some tokens" if value else "all tokens",
)
def test_the_head_is_the_same_and_the_target_reads_each_row_once(tmp_path, architecture, family, drafted):
    """Gemma 2 has an lm_head whose output is capped, so there a draft vocabulary still needs all logits."""
    target = Target(tiny_model(family), tokenizer=None)
    assert has_rows(target.output_matrix, target.device) == (family == "llama")
    loss = LossConfig(cross_entropy=0.1, total_variation=0.5, d_pace=0.5)
    plain, log = trained(target, head_of(architecture, target, drafted), rows_of_text(), tmp_path / "plain", loss=loss)
    head, read = head_of(architecture, target, drafted), counted(target)
    kept = KeptStates(
        target, head.aux_layers, normalisers=drafted is not None and has_rows(target.output_matrix, target.device)
    )
    again, kept_log = trained(target, head, rows_of_text(), tmp_path / "kept", kept, loss=loss)
    assert sum(read) == 8  # of 20 in 10 steps, and 4 in evaluations
    for one, other in zip(plain, again, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-4)
    for one, other in zip(log, kept_log, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-3)


def test_the_part_of_a_target_s_distribution_is_that_of_all_logits():
    """With a bias; without the normalisers' share of other tokens, the divergence would be wrong."""
    torch.manual_seed(0)
    output = torch.nn.Linear(6, 11).requires_grad_(False)
    hidden, features, matrix = torch.randn(7, 6), torch.randn(7, 5), torch.randn(4, 5)
    drafted, labels = torch.tensor([1, 4, 7, 10]), torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    given = [[[(features, matrix)]], labels, hidden, torch.ones(1, 1), drafted]
    loss = ChunkedLoss(output, LossConfig(total_variation=1.0), 11, chunk=3, output_matrix=output)
    whole = loss(*given)
    normalisers = output(hidden).logsumexp(-1)
    part = loss(*given, normalisers=normalisers)
    torch.testing.assert_close(part.loss, whole.loss)
    torch.testing.assert_close(part.overlap, whole.overlap)
    renormalised = output(hidden)[:, drafted].logsumexp(-1)
    assert not torch.allclose(loss(*given, normalisers=renormalised).loss, whole.loss, rtol=0.1)
    predictors = torch.tensor([0, 0, 1, 3, 3, 5, 6])
    torch.testing.assert_close(loss(*given, predictors, normalisers=normalisers).loss, loss(*given, predictors).loss)


def test_files_belong_to_a_document_a_target_and_the_layers_that_a_head_reads(target):
    """14 and 15 tokens, of which 6 are the first document: another packing or mask reads the same files."""
    rows = rows_of_text(2)
    collate = Collator(tiny_head().config, documents=True)
    kept = KeptStates(target, (), normalisers=True)
    taken(kept, collate(rows))
    shapes = sorted(tuple(load_file(file)["hidden"].shape) for file in kept.folder.iterdir())
    assert shapes == [(6, 32), (6, 32), (8, 32), (9, 32)]
    read = counted(target)
    first, second = ({"input_ids": row["input_ids"][:6]} for row in rows)
    taken(kept, collate([rows[0] | {"loss_mask": [0] * 14}, second, first]))
    assert not read
    taken(kept, collate([{"input_ids": rows[0]["input_ids"]}]))
    assert read == [1], "one document of 14 tokens is another text"
    assert len(list(kept.folder.iterdir())) == 5
    inner, rope, moved = (tiny_model() for _ in range(3))
    inner.model.layers[1].mlp.up_proj.weight.data *= 2
    rope.config.rope_parameters["rope_theta"] = 77.0
    moved.config._name_or_path = "elsewhere"
    adapted = tiny_model()
    changed, scaled, same, other = (Target(model, tokenizer=None) for model in (inner, rope, moved, adapted))
    adapted.peft_config = {"default": SimpleNamespace(to_dict=lambda: {"lora_alpha": 32})}  # in no weight
    assert changed.fingerprint == target.fingerprint  # which reads embedding and lm_head alone
    others = ((target, (), False), (target, (0,), True), (changed, (), True), (scaled, (), True), (other, (), True))
    folders = [KeptStates(*given).folder for given in others]
    assert len({kept.folder, *folders}) == 6
    assert KeptStates(same, (), True).folder == kept.folder


def test_an_adapters_set_of_names_has_one_digest_in_all_processes(target):
    """PEFT writes a set, whose order is another one in each process."""
    names = [f"layers.{i}" for i in range(9)]
    digests = []
    for listed in (set(names), names):
        target.model.peft_config = {
            "default": SimpleNamespace(to_dict=lambda listed=listed: {"target_modules": listed})
        }
        digests.append(digest(target.model))
    assert digests[0] == digests[1]


def test_rows_of_a_batch_are_read_in_any_company(target, monkeypatch):
    """The normalisers are compiled, as for a large vocabulary."""
    monkeypatch.setattr(sources, "compiling_pays", lambda device, _: can_compile(device))
    rows = rows_of_text(6)
    collate = Collator(tiny_head(architecture="eagle3").config, documents=True)
    kept = KeptStates(target, (0, 1), normalisers=True)
    taken(kept, collate(rows[1:4]))
    found = taken(kept, collate(rows))
    batch = collate(rows)
    hidden, states = target.training_states(batch["input_ids"], batch["document_ids"], (0, 1))
    for i, row in enumerate(rows):
        n = len(row["input_ids"])
        torch.testing.assert_close(found.hidden[i, :n], hidden[i, :n], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.states[i, :n], states[i, :n], rtol=1e-4, atol=1e-4)
        logits = target.logits(hidden[i, :n])
        torch.testing.assert_close(found.normalisers[i, :n], logits.logsumexp(-1), rtol=1e-4, atol=1e-4)
        assert not found.hidden[i, n:].any()


def test_a_disk_without_room_is_named_before_training(target, monkeypatch):
    """7 rows lack files: a token has 3 states of 32 float32 numbers and a normaliser, 388 bytes."""
    rows = rows_of_text()
    kept = KeptStates(target, (0, 1), normalisers=True)
    taken(kept, Collator(tiny_head().config, documents=True)(rows[:1]))
    need = 388 * sum(len(row["input_ids"]) for row in rows[1:])
    for free, enough in ((need - 1, False), (need, True)):
        monkeypatch.setattr(sources.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        with nullcontext() if enough else pytest.raises(UserError, match=re.escape("stage1.keep_states needs 0.0")):
            kept.check_room("stage1.keep_states", kept.lacking([*rows, *rows]))


def test_a_damaged_file_is_written_again_and_states_that_are_not_finite_are_not(target):
    rows = rows_of_text(2)
    batch = Collator(tiny_head().config, documents=True)(rows)
    kept = KeptStates(target, (), normalisers=True)
    before = taken(kept, batch)
    file = sorted(kept.folder.iterdir())[0]
    content = file.read_bytes()
    file.write_bytes(content[:100])
    again = taken(kept, batch)
    assert file.read_bytes() == content
    assert all(torch.equal(*pair) for pair in zip(before, again, strict=True))
    file.unlink()
    target.training_states = lambda *_: (torch.full((2, 15, 32), torch.nan),) * 2
    assert taken(kept, batch).hidden.isnan().any()
    assert not file.exists()


def test_a_thread_reads_a_batch_ahead_and_writes_behind(target, monkeypatch):
    """The second batch has the texts of the first one, which are still being written when it is taken."""
    batch = Collator(tiny_head().config, documents=True)(rows_of_text(2))
    kept, computed, threads = KeptStates(target, (0,), normalisers=False), counted(target), []

    def note(call):
        return lambda *given: threads.append(threading.current_thread()) or time.sleep(0.05) or call(*given)

    monkeypatch.setattr(sources, "write_bytes", note(sources.write_bytes))
    batches = kept.over([batch, batch, batch])
    made = kept.take(next(batches))
    for later in batches:
        assert all(torch.equal(*pair) for pair in zip(made[:2], kept.take(later)[:2], strict=True))
    assert computed == [2]
    assert len(threads) == 4
    assert threading.main_thread() not in threads
    monkeypatch.setattr(sources, "load_file", note(sources.load_file))
    batches = kept.over([batch, batch])
    next(batches)
    kept.files.read(lambda: None).result()
    assert len(threads) == 12, "the second batch is read before the first one is taken"
    assert len(list(kept.over([batch] * 4))) == 4
    kept.files.read(lambda: None).result()
    assert len(threads) == 20, "of a step's micro-batches, which the loop takes at once, two are read"


def test_a_full_disk_ends_the_training_that_keeps_states(target, monkeypatch, tmp_path):
    """Also after the last step, when nothing reads the files."""
    monkeypatch.setattr(sources, "write_bytes", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    monkeypatch.setattr(Loop, "evaluate", lambda self: None)
    head, kept = head_of("mlp", target, None), KeptStates(target, (), normalisers=False)
    with pytest.raises(OSError, match="No space left"):
        trained(target, head, rows_of_text(), tmp_path / "run", kept, steps=1)


@pytest.mark.parametrize("kept", [True, False])
def test_the_heads_autocast_does_not_round_the_targets_logits(kept):
    """In bfloat16 logits of 30 are off by up to 0.06, and so the probabilities by up to 6%."""
    torch.manual_seed(0)
    output = torch.nn.Linear(64, 50, bias=False).requires_grad_(False)
    hidden, features, matrix = torch.randn(9, 64) * 30, torch.randn(9, 5), torch.randn(4, 5)
    drafted = output(hidden).topk(4).indices[0]
    loss, seen = ChunkedLoss(output, LossConfig(), 50, output_matrix=output), []
    compute = loss.target_probs
    loss.target_probs = lambda *given: seen.append(compute(*given).p) or compute(*given)
    normalisers = output(hidden).logsumexp(-1) if kept else None
    with torch.autocast("cpu", torch.bfloat16):
        loss(
            [[(features, matrix)]], torch.zeros(1, 9).long(), hidden, torch.ones(1, 1), drafted, normalisers=normalisers
        )
    torch.testing.assert_close(seen[0], output(hidden).softmax(-1)[:, drafted], rtol=1e-4, atol=1e-6)
