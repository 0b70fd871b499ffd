"""The decoding loop: where rows end, what they stream, which statistics they keep, and how slots are reused."""

import gc
import random
import re
import weakref

import numpy as np
import pytest
import torch
from conftest import RECURRENT_RUNS, VOCAB, Oracle, tiny_head, tiny_model
from drafters import make_drafter
from transformers import AutoModelForCausalLM

from data.writers import engine as engine_writer
from data.writing import Writing
from speculator import (
    Candidates,
    Chain,
    DraftModelDrafter,
    Engine,
    FixedTree,
    HeadDrafter,
    NgramDrafter,
    Sampling,
    Target,
    Tree,
    UserError,
    generate,
)
from speculator.decoding import engine as engine_module
from speculator.decoding import request as request_module
from speculator.decoding import scheduler as scheduler_module
from speculator.decoding import streaming
from speculator.decoding.draft import Draft
from speculator.decoding.request import Request
from speculator.decoding.scheduler import PREFILLING, WAITING_FOR_PREFIX, Scheduler
from speculator.prompts import Conversation
from speculator.target.cache import kv_cache

PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 1]]


@pytest.mark.parametrize("shape", [None, Chain(3), FixedTree([(0,), (1,), (0, 0)])], ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("late", [False, True], ids=["prefill", "step"])
def test_states_that_are_not_finite_end_the_decoding(target, head, shape, sampling, late):
    drafter = shape and HeadDrafter(head, shape)
    text = generate(target, drafter, [[3, 3]], sampling, max_new_tokens=30).tokens[0]
    bad = next(token for token in text[5:] if token not in [3, *text[:5]]) if late else 3
    target.model.get_input_embeddings().weight.data[bad] = torch.nan
    made = generate(target, drafter, [[3, 3]], sampling, max_new_tokens=30)
    assert made.finish_reasons == ["not_finite"]
    assert made.tokens[0] == text[: len(made.tokens[0])]
    with pytest.raises(UserError, match="not finite"):
        made.check()


@pytest.mark.parametrize("rule", ["rejection", "block", "multi_candidate"])
def test_one_logit_that_is_not_finite_ends_the_decoding_under_every_rule(target, head, rule, monkeypatch):
    """The probabilities of its row are all NaN, though the token that is drawn from them has a finite logit."""
    logits = target.logits

    def broken(hidden):
        made = logits(hidden)
        made[..., 5] = torch.inf
        return made

    engine = Engine(target, HeadDrafter(head, Candidates((2, 1)) if rule == "multi_candidate" else 2), rule=rule)
    request = engine.submit([3, 3], Sampling(1.0), max_new_tokens=30)
    engine.step()
    monkeypatch.setattr(target, "logits", broken)
    engine.run()
    assert request.finish_reason == "not_finite"
    with pytest.raises(UserError, match="not finite"):
        request.check()


def absent(texts: list[list[int]]) -> int:
    """A token that is in none of these texts."""
    return next(token for token in range(VOCAB) if not any(token in text for text in texts))


@pytest.mark.parametrize("name", ["none", "head-tree", "attention-chain", "model-chain"])
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_5", marks=RECURRENT_RUNS)])
def test_a_row_whose_logits_are_not_finite_fails_alone(name, family, caplog):
    """In the prompt, and later. Neither its neighbours nor the next text in its row notice."""
    target = Target(tiny_model(family), None)
    expected = generate(target, None, PROMPTS, max_new_tokens=12, eos_token_ids=()).tokens
    bad = absent([*PROMPTS, *expected])
    target.model.get_input_embeddings().weight.data[bad] = torch.nan
    engine = Engine(target, make_drafter(name, target), slots=2)
    options = {"max_new_tokens": 12, "eos_token_ids": ()}
    prompts = [PROMPTS[0], [1, bad, *range(12)], PROMPTS[1], PROMPTS[2]]
    made = [engine.submit(prompt, **options) for prompt in prompts]
    engine.run()
    assert [request.tokens for request in made] == [expected[0], [], *expected[1:]]
    assert [request.finish_reason for request in made] == ["length", "not_finite", "length", "length"]
    together = engine.generate(prompts, **options)
    assert (together.tokens, together.finish_reasons) == (
        [each.tokens for each in made],
        [each.finish_reason for each in made],
    )
    assert together.failures == ["", made[1].failure, "", ""]
    assert caplog.messages == [f"1 of 4 texts failed, text 2 first: {made[1].failure}"]
    assert engine.generate(PROMPTS, **options).check().tokens == expected


@pytest.mark.parametrize("name", ["none", "attention-chain"])
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_5", marks=RECURRENT_RUNS)])
@pytest.mark.parametrize("slots", [2, 4])
def test_a_pass_that_runs_out_of_memory_is_made_smaller(name, family, slots, monkeypatch, caplog):
    """It has written its keys and states when it fails. Only a prompt that fits no pass fails; others may decode."""
    target = Target(tiny_model(family), None)
    prompts = [*PROMPTS, *([first] * 50 for first in range(1, 4))]
    options = {"max_new_tokens": 12, "eos_token_ids": ()}
    expected = generate(target, None, prompts, **options).tokens
    bad = absent([*prompts, *expected])
    engine, extend = Engine(target, make_drafter(name, target), slots=slots), target.extend

    def limited(cache, tokens, *given, **how):
        hidden = extend(cache, tokens, *given, **how)
        if tokens.numel() > 64 or bad in tokens[:, 0]:  # drafts may have it too
            raise torch.OutOfMemoryError("no room")
        return hidden

    monkeypatch.setattr(target, "extend", limited)
    made = engine.generate([*prompts[:1], [bad] * 90, *prompts[1:]], **options)
    assert (made.tokens, made.finish_reasons[1]) == ([expected[0], [], *expected[1:]], "memory")
    assert engine.generate(prompts, **options).check().tokens == expected
    assert re.match(r"a prefill pass of \d+ tokens ran out of memory", caplog.messages[0])


@pytest.mark.parametrize(("last", "forgotten"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("name", ["none", "attention-chain"])
def test_a_cancelled_prompt_whose_states_are_not_finite_leaves_nothing(name, last, forgotten, monkeypatch):
    monkeypatch.setitem(kv_cache.BUCKETS, "cpu", 16)  # attention reads beyond a row's own tokens
    target = Target(tiny_model(), None)
    options = {"max_new_tokens": 12, "eos_token_ids": ()}
    expected = generate(target, None, PROMPTS, **options).tokens
    bad = absent([*PROMPTS, *expected])
    target.model.get_input_embeddings().weight.data[bad] = torch.nan
    engine = Engine(target, make_drafter(name, target), slots=2, chunk=8)
    cut = []
    engine.submit([5] * 8, max_new_tokens=1, on_step=lambda *_: last and cut[0].cancel())
    cut.append(engine.submit([bad] * (6 if last else 20), **options))
    engine.step()
    cut[0].cancel()
    if forgotten:
        engine.forget()
    assert engine.generate(PROMPTS, **options).tokens == expected
    assert cut[0].finish_reason == "cancelled"


class Poisoned(Oracle):
    """Drafts a token whose states are not finite: three of it once, then one right token a step."""

    def propose(self, pending, noise, texts):
        draft = super().propose(pending, noise, texts)
        if self.steps:
            return Draft(draft.tokens[:, :1], torch.ones_like(pending))
        self.steps = 1
        return Draft(torch.full_like(draft.tokens, self.bad), draft.lengths)


@pytest.mark.parametrize("bucket", [1, 16])
def test_rejected_tokens_whose_states_are_not_finite_leave_nothing(target, bucket, monkeypatch):
    """Their keys are masked, but NaN + -inf is NaN, for their own row and for the next text in it."""
    monkeypatch.setitem(kv_cache.BUCKETS, "cpu", bucket)
    expected = generate(target, None, PROMPTS, max_new_tokens=12, eos_token_ids=()).tokens
    drafter = Poisoned(expected, prompts=PROMPTS)
    drafter.steps = 0
    drafter.bad = absent([*PROMPTS, *expected])
    target.model.get_input_embeddings().weight.data[drafter.bad] = torch.nan
    made = Engine(target, drafter, slots=3).generate(PROMPTS, max_new_tokens=12, eos_token_ids=())
    assert (made.tokens, made.finish_reasons) == (expected, ["length"] * 3)


@pytest.mark.parametrize(
    "work",
    [
        lambda target, folder: generate(target, None, PROMPTS, max_new_tokens=2),
        lambda target, folder: Engine(target).generate(PROMPTS, max_new_tokens=2),
        lambda target, folder: engine_writer.EngineWriter(target, batch_size=2).write(
            [Conversation(prompt) for prompt in PROMPTS], folder, Writing(max_new_tokens=2)
        ),
    ],
    ids=["generate", "engine", "rows"],
)
def test_prompts_are_checked_once(target, tmp_path, work, monkeypatch):
    """All of them together, before one is decoded; a later error would not name the prompt's number."""
    checked, check = [], request_module.check_prompts
    counted = lambda target, prompts: checked.append(len(prompts)) or check(target, prompts)  # noqa: E731
    for module in (request_module, engine_module, engine_writer):
        monkeypatch.setattr(module, "check_prompts", counted)
    work(target, tmp_path)
    assert checked == [len(PROMPTS)]


def test_the_others_are_complete_if_there_is_no_memory_for_one(target, monkeypatch):
    expected = generate(target, None, PROMPTS, max_new_tokens=8, eos_token_ids=()).tokens
    engine = Engine(target, slots=2)
    engine.generate(PROMPTS[:1], max_new_tokens=8)
    grow = engine.cache.grow

    def limited(capacity):
        if capacity > 60:
            raise MemoryError
        return grow(capacity)

    monkeypatch.setattr(engine.cache, "grow", limited)
    made = engine.generate([[1] * 90, *PROMPTS], max_new_tokens=8, eos_token_ids=())
    assert (made.tokens, made.finish_reasons) == ([[], *expected], ["memory", *["length"] * 3])
    with pytest.raises(UserError, match="too little memory for a prompt of 90 tokens"):
        made.check()


def test_a_cache_grows_to_what_is_needed_if_there_is_no_memory_for_more(target, monkeypatch):
    """Half more than there is was asked for again, and the request failed."""
    engine = Engine(target, slots=1, capacity=80)
    engine.generate(PROMPTS[:1], max_new_tokens=8)
    grow = engine.cache.grow

    def limited(capacity):
        if capacity > 100:
            raise MemoryError
        return grow(capacity)

    monkeypatch.setattr(engine.cache, "grow", limited)
    made = engine.generate([[1] * 70], max_new_tokens=20, eos_token_ids=())
    assert (made.finish_reasons, len(made.tokens[0])) == (["length"], 20)


def test_finished_requests_are_not_kept(target):
    """Of 300 prompts through two slots 96 were, with texts and log-probabilities."""
    engine, alive = Engine(target, slots=2), []
    for number in range(100):
        engine.submit([number % VOCAB, number // VOCAB, *range(30)] + [3] * 8, max_new_tokens=1)
        alive.append(weakref.ref(engine.waiting[-1]))
    engine.run()
    gc.collect()
    assert sum(each() is not None for each in alive) <= 2
    assert not engine.scheduler._prefixes


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 100])
def test_a_common_prefix_ends_at_the_first_difference(length):
    for more in ([], [1], [1] * 30):
        for other in ([], [2], [2] * 7):
            assert scheduler_module.common_prefix([5] * length + more, [5] * length + other) == length


def test_seeds_go_on_after_the_largest(target):
    """Row 1 asked for a seed beyond 64 bits, which nobody gave."""
    most = 2**63 - 1
    rows = generate(target, None, PROMPTS[:1] * 2, Sampling(1.0, seed=most), max_new_tokens=8).tokens
    assert rows[1] == generate(target, None, PROMPTS[:1], Sampling(1.0, seed=-most - 1), max_new_tokens=8).tokens[0]


def test_stop_strings_decode_a_step_once(target_folder, monkeypatch):
    """And never the first tokens alone, unless they may not end the completion."""
    target = Target.load(target_folder)
    plain = generate(target, None, PROMPTS[:1], max_new_tokens=30, eos_token_ids=()).tokens
    calls: list[int] = []
    real = streaming.decoded
    monkeypatch.setattr(streaming, "decoded", lambda *given: calls.append(1) or real(*given))
    engine = Engine(target, Oracle(plain))
    request = engine.submit(PROMPTS[0], max_new_tokens=30, eos_token_ids=(), stop_strings=["not there", "nor this"])
    engine.run()
    assert request.tokens == plain[0]
    assert len(calls) <= 2 + len(request.steps)  # the prompt's last tokens, and those of the prefill


def test_stop_tokens_beyond_the_vocabulary_hold_nothing_back(target):
    plain = generate(target, None, [[1, 2]], max_new_tokens=8, eos_token_ids=()).tokens[0]
    engine = Engine(target)
    request = engine.submit([1, 2], max_new_tokens=8, eos_token_ids={VOCAB, 10**6, -1}, min_tokens=4)
    engine.run()
    assert request.tokens == plain


def test_a_cancelled_request_for_which_there_is_no_memory_fails_no_other(target, monkeypatch):
    engine = Engine(target, slots=2)
    short = engine.submit([1, 2], max_new_tokens=12, eos_token_ids=())
    engine.step()
    grow = engine.cache.grow

    def limited(capacity):
        if capacity > 80:
            raise MemoryError
        return grow(capacity)

    monkeypatch.setattr(engine.cache, "grow", limited)
    engine.submit([1] * 60, max_new_tokens=60).cancel()
    engine.run()
    assert (short.finish_reason, len(short.tokens)) == ("length", 12)


def test_an_engine_forgets_after_an_interrupt(target, monkeypatch):
    engine = Engine(target, slots=1)
    with monkeypatch.context() as patch:
        patch.setattr(target, "extend", lambda *given, **named: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS)
    engine.forget()
    assert (
        engine.generate(PROMPTS[:1], max_new_tokens=4).tokens
        == generate(target, None, PROMPTS[:1], max_new_tokens=4).tokens
    )


def test_eos_ends_a_row_and_the_others_continue(target, head):
    plain = generate(target, None, PROMPTS, max_new_tokens=30).tokens
    target.model.generation_config.eos_token_id = [plain[0][4], plain[1][12]]
    eos = target.eos_token_ids
    expected = [row[: next((i + 1 for i, token in enumerate(row) if token in eos), 30)] for row in plain]
    for drafter in (None, HeadDrafter(head), Oracle(plain, prompts=PROMPTS)):
        assert generate(target, drafter, PROMPTS, max_new_tokens=30).tokens == expected
    oracle = Oracle(plain, prompts=PROMPTS)
    assert len(generate(target, oracle, PROMPTS, max_new_tokens=30, eos_token_ids=()).tokens[0]) == 30


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_row_ends_before_min_tokens(target, head, temperature):
    """Rows with other limits share a batch; with and without log-probabilities, chains, trees and lookup agree."""
    plain = generate(target, None, PROMPTS, max_new_tokens=30).tokens
    target.model.generation_config.eos_token_id = sorted({token for row in plain for token in row[:6:2]})
    eos = target.eos_token_ids
    logits = {}

    def likeliest(sequence, early):
        if tuple(sequence) not in logits:
            logits[tuple(sequence)] = target.model(torch.tensor([sequence]), use_cache=False).logits[0, -1].detach()
        row = logits[tuple(sequence)].clone()
        row[sorted(eos) if early else []] = -torch.inf
        return int(row.argmax())

    limits, expected, found = [0, 9, 20], [], []
    for prompt, least in zip(PROMPTS, limits, strict=True):
        text = []
        while len(text) < 25 and not (text and text[-1] in eos):
            text.append(likeliest([*prompt, *text], len(text) < least))
        expected.append(text)
    drafters = [
        None,
        HeadDrafter(head),
        HeadDrafter(head, FixedTree([(0,), (1,), (0, 0)])),
        NgramDrafter(),
        Oracle(plain, prompts=PROMPTS),
    ]
    for drafter in drafters:
        for logprobs in (None, 2):
            engine = Engine(target, drafter, slots=3)
            requests = [
                engine.submit(p, Sampling(temperature, seed=7), max_new_tokens=25, min_tokens=n, logprobs=logprobs)
                for p, n in zip(PROMPTS, limits, strict=True)
            ]
            engine.run()
            found.append([request.tokens for request in requests])
    assert all(texts == found[0] for texts in found)
    if temperature == 0:
        assert found[0] == expected
    assert all(not set(text[:n]) & eos for text, n in zip(found[0], limits, strict=True))
    assert any(text[-1] in eos for text in found[0])


@pytest.mark.parametrize("rule", ["rejection", "block", "multi_candidate"])
def test_no_rule_samples_an_end_before_min_tokens(target, head, rule):
    target.model.generation_config.eos_token_id = list(range(0, VOCAB, 2))
    shape = Candidates([2, 2]) if rule == "multi_candidate" else Chain(3)
    engine = Engine(target, HeadDrafter(head, shape), slots=3, rule=rule)
    made = engine.generate(PROMPTS, [Sampling(1.0, seed=3)] * len(PROMPTS), max_new_tokens=25, min_tokens=15)
    assert all(not any(token % 2 == 0 for token in row[:15]) for row in made.tokens)
    assert "eos" in made.finish_reasons


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_row_ends_at_the_context_length(family):
    target = Target(tiny_model(family), tokenizer=None)
    prompt = [1] * (target.context_length - 6)
    expected = generate(target, None, [prompt, [1, 2]], max_new_tokens=40).tokens
    assert [len(row) for row in expected] == [6, 40]
    oracle = Oracle(expected, prompts=[prompt, [1, 2]])
    assert generate(target, oracle, oracle.prompts, max_new_tokens=40).tokens == expected


def test_statistics_leave_out_the_step_that_the_limit_cut(target):
    plain = generate(target, None, [PROMPTS[0]], max_new_tokens=10).tokens
    generation = generate(target, Oracle(plain), [PROMPTS[0]], max_new_tokens=8)
    assert [step.emitted for step in generation.steps[0]] == [4, 3]
    assert [step.cut for step in generation.steps[0]] == [False, True]
    assert generation.acceptance_length == 4.0


def test_tokens_stream_in_order(target, head):
    seen: list[list[int]] = [[] for _ in PROMPTS]
    generation = generate(
        target, HeadDrafter(head), PROMPTS, max_new_tokens=12, on_step=lambda row, new, accepted: seen[row].extend(new)
    )
    assert seen == generation.tokens


@pytest.mark.parametrize("kind", [torch.tensor, np.array, tuple, lambda row: [np.int32(token) for token in row]])
def test_prompts_may_be_tensors_arrays_and_tuples(target, kind):
    expected = generate(target, None, PROMPTS, max_new_tokens=5).tokens
    assert generate(target, None, [kind(prompt) for prompt in PROMPTS], max_new_tokens=5).tokens == expected
    assert generate(target, None, torch.tensor(PROMPTS[:1]), max_new_tokens=5).tokens == expected[:1]


def test_stop_strings_end_a_row_where_transformers_does(target_folder):
    target = Target.load(str(target_folder))
    model = AutoModelForCausalLM.from_pretrained(target_folder)
    stopped = 0
    for seed in range(8):
        torch.manual_seed(seed)
        prompt = torch.randint(4, 300, (20,)).tolist()
        plain = generate(target, None, [prompt], max_new_tokens=40).tokens[0]
        text = target.tokenizer.decode(plain)
        whole = [text[i : i + 3] for i in range(6, len(text) - 3) if text[i : i + 3].isascii()]
        if not whole:
            continue
        stops = ["no such text", whole[-1]]
        expected = model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=40,
            stop_strings=stops,
            tokenizer=target.tokenizer,
            pad_token_id=0,
        )[0, 20:].tolist()
        stopped += len(expected) < 40
        for drafter in (None, Oracle([plain]), NgramDrafter()):
            assert generate(target, drafter, [prompt], max_new_tokens=40, stop_strings=stops).tokens == [expected]
    assert stopped >= 2


@pytest.mark.parametrize("common", [3, 30])
def test_alternating_chats_keep_their_slots(target, head, common):
    """Both share a prefix; neither takes the other's slot while another is free."""
    beginning = [i * 7 % 32 for i in range(common)]
    chats = [[*beginning, *range(10, 20)], [*beginning, *range(20, 30)]]
    for drafter in (None, HeadDrafter(head)):
        engine = Engine(target, drafter, slots=2)
        for turn in range(3):
            for chat in chats:
                before, known = engine.num_prefilled_tokens, len(chat)
                (answer,) = engine.generate([chat], max_new_tokens=6).tokens
                assert answer == generate(target, drafter, [list(chat)], max_new_tokens=6).tokens[0]
                assert engine.num_prefilled_tokens - before <= (3 if turn else known)
                chat += [*answer, 7, 8]


def test_a_slot_was_last_used_when_its_request_ended(target):
    engine, texts = Engine(target, slots=2), [[token] * 20 for token in (3, 4, 5)]
    engine.submit(texts[0], max_new_tokens=20)
    engine.step()
    engine.submit(texts[1], max_new_tokens=2)  # joins later, and ends first
    engine.run()
    engine.generate([texts[2]], max_new_tokens=2)
    before = engine.num_prefilled_tokens
    engine.generate([texts[0]], max_new_tokens=2)
    assert engine.num_prefilled_tokens == before + 1


def test_a_prefix_source_is_not_reused_before_it_is_copied(target):
    engine, long = Engine(target, slots=3), [i * 7 % 32 for i in range(80)]
    for prompt in ([3] * 20, long, [4] * 20):
        engine.generate([prompt], max_new_tokens=2)
    before = engine.num_prefilled_tokens
    engine.generate([[*long[:30], 9, 9], [5] * 6], max_new_tokens=2)
    assert engine.num_prefilled_tokens == before + 2 + 6


def test_a_chats_next_turn_processes_only_new_tokens(target, head):
    """Two rows and two turns; the second turn edits the end of the first. Includes drafters with per-row state."""
    draft_model = Target(tiny_model("qwen3"), None)
    for drafter in (
        None,
        HeadDrafter(head),
        HeadDrafter(head, Tree((3, 2), 4)),
        DraftModelDrafter(draft_model, target),
    ):
        engine = Engine(target, drafter, slots=2)
        first = [[5, 6, 7, 8, 9, 10], [1, 2, 3]]
        answers = engine.generate(first, Sampling(1.0, seed=4), max_new_tokens=12).tokens
        assert engine.num_prefilled_tokens == 9
        turns = [first[0] + answers[0] + [11, 12], first[1] + answers[1][:5] + [13, 14, 15]]
        again = engine.generate(turns, max_new_tokens=12).tokens
        # Row 0: its newest token and the two after it; row 1: from the first that differs.
        assert engine.num_prefilled_tokens == 9 + 3 + 3
        assert again == generate(target, drafter, turns, max_new_tokens=12).tokens


def test_invalid_rules_and_settings_are_rejected(target, head):
    with pytest.raises(UserError, match="tokens"):
        generate(target, HeadDrafter(head), [[1]], rule="tokens")
    with pytest.raises(UserError, match="does not fit"):
        generate(target, HeadDrafter(head, Tree((2, 2), 3)), [[1]], rule="rejection")
    for count in (0, 2):
        with pytest.raises(UserError, match=f"sampling: got {count} settings"):
            generate(target, None, [[1]], [Sampling()] * count)
    with pytest.raises(UserError, match="seed"):
        Sampling(1.0, seed=2**63)
    with pytest.raises(UserError, match="slots"):
        Engine(target, slots=0)
    with pytest.raises(UserError, match="chunk"):
        Engine(target, chunk=0)
    with pytest.raises(UserError, match="num_speculative_tokens 4"):
        HeadDrafter(head, Chain(4))
    with pytest.raises(UserError, match="tree"):
        Tree((2, 2), 7)


@pytest.mark.parametrize("size", [24, 40])
def test_a_draft_models_vocabulary_may_be_padded_otherwise(target, size):
    """A smaller vocabulary never drafts the missing tokens; a larger one is cut and renormalised."""
    model = tiny_model("qwen3")
    model.resize_token_embeddings(size)
    drafter = DraftModelDrafter(Target(model, None), target)
    prompts = [[1, 2, 3], [4]]
    assert (
        generate(target, drafter, prompts, max_new_tokens=12).tokens
        == generate(target, None, prompts, max_new_tokens=12).tokens
    )
    assert len(generate(target, drafter, prompts, Sampling(1.0), max_new_tokens=12).tokens[0]) == 12


def test_a_target_may_be_cast_after_its_load_and_run_under_autocast(target):
    drafter = HeadDrafter(tiny_head(), FixedTree([(0,), (1,), (0, 0)]))
    prompts = [[1, 2, 3, 4], [5, 6], [7, 8, 9]]
    with torch.autocast("cpu", torch.bfloat16):
        assert [len(row) for row in generate(target, drafter, prompts, max_new_tokens=8).tokens] == [8] * 3
    target.model.double()
    drafter.head.double()
    expected = generate(Target(tiny_model().double(), None), None, prompts, max_new_tokens=8).tokens
    assert generate(target, drafter, prompts, max_new_tokens=8).tokens == expected


# ---- slots


def chain(dtype=torch.float64) -> HeadDrafter:
    return HeadDrafter(tiny_head().to(dtype))


def double_target() -> Target:
    """Full and sliding layers, in float64: no near-ties."""
    return Target(tiny_model("gemma3").double(), tokenizer=None)


DRAFTERS = [
    "none",
    "head-tree",
    "head-candidates",
    "model-tree",
    "ngram",
    "attention-chain",
    "block-chain",
]


def others_in_soak(*names: str) -> list:
    """Every drafter of `DRAFTERS`; those without a name here run in `make soak`."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.soak) for name in DRAFTERS]


def ragged(count: int) -> tuple[list[list[int]], list[Sampling], list[int]]:
    """Mixed prompts, sampling and lengths; every fourth prompt shares a prefix with the one before it."""
    draw = random.Random(0)
    prompts: list[list[int]] = []
    for i in range(count):
        prompt = [draw.randrange(32) for _ in range(draw.choice([1, 3, 9, 30]))]
        prompts.append(prompts[-1][: draw.randrange(1, 20)] + prompt if i % 4 == 3 else prompt)
    settings = [Sampling(draw.choice([0.0, 0.7, 1.0]), draw.choice([0, 5]), seed=i) for i in range(count)]
    return prompts, settings, [draw.choice([1, 2, 7, 20, 45]) for _ in range(count)]


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_completion_does_not_depend_on_admission_time_or_batch_mates(name):
    """Requests are admitted and finish at random, in three slots and chunks of seven tokens; some are cancelled."""
    target = double_target()
    prompts, settings, limits = ragged(10)
    expected = [
        generate(target, make_drafter(name, target), [prompt], [own], max_new_tokens=limit)
        for prompt, own, limit in zip(prompts, settings, limits, strict=True)
    ]
    engine = Engine(target, make_drafter(name, target), slots=3, chunk=7)
    draw, requests = random.Random(1), []
    for prompt, own, limit in zip(prompts, settings, limits, strict=True):
        requests.append(engine.submit(prompt, own, max_new_tokens=limit))
        for _ in range(draw.randrange(4)):
            engine.step()
        if draw.randrange(4) == 0:
            draw.choice(requests).cancel()
    engine.run()
    cancelled = 0
    for request, alone in zip(requests, expected, strict=True):
        if request.finish_reason == "cancelled":
            cancelled += 1
            assert request.tokens == alone.tokens[0][: len(request.tokens)]
        else:
            assert request.tokens == alone.tokens[0]
            assert request.steps == alone.steps[0]
            assert [request.finish_reason] == alone.finish_reasons
    assert 0 < cancelled < 6
    assert engine.num_prefilled_tokens < sum(map(len, prompts)), "some prompts began as a slot's text"


@pytest.mark.parametrize("name", ["none", "model-tree"])
def test_max_batch_size_changes_no_completion(name):
    target = double_target()
    prompts, settings, limits = ragged(9)
    whole = generate(target, make_drafter(name, target), prompts, settings, max_new_tokens=limits)
    for size in (1, 4):
        made = generate(
            target, make_drafter(name, target), prompts, settings, max_new_tokens=limits, max_batch_size=size
        )
        assert (made.tokens, made.steps) == (whole.tokens, whole.steps)
    with pytest.raises(UserError, match="max_batch_size"):
        generate(target, None, prompts, max_batch_size=0)
    with pytest.raises(UserError, match="max_new_tokens"):
        generate(target, None, prompts, max_new_tokens=[1, 2])


@pytest.mark.parametrize("name", others_in_soak("none", "attention-chain"))
def test_chunked_prefill_equals_whole_prefill(name):
    target = double_target()
    prompts = [[i % 32 for i in range(50)], [3, 1, 4], [i * 7 % 32 for i in range(64)]]
    expected = generate(target, make_drafter(name, target), prompts, Sampling(0.8), max_new_tokens=20)
    for chunk in (1, 5) if name == "none" else (5,):
        engine = Engine(target, make_drafter(name, target), slots=3, chunk=chunk)
        made = engine.generate(prompts, Sampling(0.8), max_new_tokens=20)
        assert (made.tokens, made.steps) == (expected.tokens, expected.steps)


def test_a_long_prompt_does_not_stall_the_others():
    """During its chunked prefill the other rows take one step per chunk."""
    target = double_target()
    engine = Engine(target, slots=2, chunk=4)
    short = engine.submit([1, 2], max_new_tokens=40)
    engine.step()
    long = engine.submit([i % 32 for i in range(80)], max_new_tokens=5)
    processed = engine.num_prefilled_tokens
    for _ in range(10):
        before = len(short.tokens)
        engine.step()
        assert len(short.tokens) == before + 1
    assert engine.num_prefilled_tokens == processed + 40
    assert not long.tokens
    short_again = engine.submit([5], max_new_tokens=2)
    engine.run()
    assert [len(request.tokens) for request in (short, long, short_again)] == [40, 5, 2]


@pytest.mark.parametrize(("bucket", "processed"), [(1, 17), (16, 32)])
def test_prompts_are_prefilled_as_one_row_without_padding(target, monkeypatch, bucket, processed):
    """Where the cache has buckets, the row has whole buckets; no completion changes."""
    expected = generate(target, None, PROMPTS, max_new_tokens=9, max_batch_size=1).tokens
    monkeypatch.setitem(kv_cache.BUCKETS, "cpu", bucket)
    shapes = []
    target.model.base_model.register_forward_pre_hook(
        lambda body, args, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    assert generate(target, None, PROMPTS, max_new_tokens=9).tokens == expected
    assert shapes == [(1, processed), *[(3, 1)] * 8]


@pytest.mark.parametrize("name", others_in_soak("none", "attention-chain", "model-tree", "block-chain"))
def test_a_slot_that_held_a_longer_sequence_is_as_new(name):
    """The next prompt is unrelated, shares a prefix, or is a prefix of the old sequence."""
    target = double_target()
    engine = Engine(target, make_drafter(name, target), slots=1)
    first = [i * 5 % 32 for i in range(40)]
    (answer,) = engine.generate([first], Sampling(1.0, seed=3), max_new_tokens=30).tokens
    text = first + answer
    for prompt in ([9, 9, 9], text, text[:20], [*text[:35], 1, 2, 3], text[:60], [9, 9, 9]):
        expected = generate(target, make_drafter(name, target), [prompt], Sampling(1.0, seed=5), max_new_tokens=12)
        made = engine.generate([prompt], Sampling(1.0, seed=5), max_new_tokens=12)
        assert (made.tokens, made.steps) == (expected.tokens, expected.steps)


def test_a_request_takes_the_slot_with_the_longest_common_prefix(target):
    engine = Engine(target, slots=3)
    texts = [[1, 2, 3, 4, 5, 6], [1, 2, 9, 9], [7, 7, 7]]
    engine.generate(texts, max_new_tokens=2)
    before = engine.num_prefilled_tokens
    engine.generate([[1, 2, 3, 4, 8]], max_new_tokens=2)
    assert engine.num_prefilled_tokens == before + 1
    engine.generate([[7, 7, 5], [1, 2, 9, 5]], max_new_tokens=2)
    assert engine.num_prefilled_tokens == before + 3
    engine.forget()
    engine.generate([[1, 2, 9, 5]], max_new_tokens=2)
    assert engine.num_prefilled_tokens == before + 7


SIBLINGS = [[i * 7 % 32 for i in range(40)]] * 4 + [[i * 7 % 32 for i in range(30)] + [5, 4, 3], [8, 9]]
EACH = [Sampling(0.9, seed=seed) for seed in range(len(SIBLINGS))]


def beside_siblings(name: str, chunk: int, waits: int) -> tuple[list, Engine]:
    """Decode prompts with a common prefix, each submitted `waits` steps after the one before."""
    target = double_target()
    engine, requests = Engine(target, make_drafter(name, target), slots=len(SIBLINGS), chunk=chunk), []
    for prompt, own in zip(SIBLINGS, EACH, strict=True):
        requests.append(engine.submit(prompt, own, max_new_tokens=10))
        for _ in range(waits):
            engine.step()
    engine.run()
    return [(request.tokens, request.steps) for request in requests], engine


def without_siblings(name: str) -> list:
    """Decode each prompt in its own engine."""
    target = double_target()
    each = [
        generate(target, make_drafter(name, target), [prompt], [own], max_new_tokens=10)
        for prompt, own in zip(SIBLINGS, EACH, strict=True)
    ]
    return [(alone.tokens[0], alone.steps[0]) for alone in each]


@pytest.mark.parametrize("name", others_in_soak("none", "head-tree", "attention-chain", "model-tree", "block-chain"))
def test_a_common_prefix_is_prefilled_once(name):
    """Requests arrive together, during the prefill of the prefix, or later; the last token is always computed."""
    alone = without_siblings(name)
    for chunk, waits in ((64, 0), (7, 2)):
        made, engine = beside_siblings(name, chunk, waits)
        assert made == alone
        again = engine.rows.memory.overlap
        assert engine.num_prefilled_tokens == 40 + 3 * (1 + again) + (3 + again) + 2


def test_hash_collisions_of_prefixes_change_no_completion(monkeypatch):
    alone = without_siblings("none")
    monkeypatch.setattr(scheduler_module, "_block_hashes", lambda prompt: [0] * (len(prompt) // 8))
    assert beside_siblings("none", 7, 2)[0] == alone


def test_a_destination_of_a_copy_is_not_a_source_in_the_same_pass():
    """All rows are copied at once, so a chain of prefix sources takes several passes."""
    scheduler = Scheduler(3)
    texts = [list(range(10)), [*range(8), 50, 51], [*range(6), 60]]
    leaders = [None, (scheduler.slots[0], texts[0], 8), (scheduler.slots[1], texts[1], 6)]
    for slot, text, leader in zip(scheduler.slots, texts, leaders, strict=True):
        slot.sequence, slot.prefix_source, slot.phase = text, leader, WAITING_FOR_PREFIX if leader else PREFILLING
        slot.request = Request(text, Sampling(), max_new_tokens=4)
    scheduler.slots[0].num_computed_tokens = 10
    assert scheduler.share_prefixes() == ([0], [1], 8)
    assert [slot.num_computed_tokens for slot in scheduler.slots] == [10, 8, 0]
    assert scheduler.share_prefixes() == ([1], [2], 6)
    assert scheduler.share_prefixes() == ([], [], 0)


def test_missing_or_early_copies_change_completions(monkeypatch):
    alone = without_siblings("none")
    with monkeypatch.context() as patch:
        patch.setattr("speculator.target.cache.kv_cache.KVCache.move", lambda *given: None)
        assert beside_siblings("none", 64, 0)[0] != alone
    share_prefixes = Scheduler.share_prefixes

    def too_early(scheduler):
        leaders = {scheduler.slots[row].prefix_source[0] for row in scheduler.rows_in(WAITING_FOR_PREFIX)}
        known = {leader: leader.num_computed_tokens for leader in leaders}
        for leader in leaders:
            leader.num_computed_tokens = 40
        moved = share_prefixes(scheduler)
        for leader in leaders:
            leader.num_computed_tokens = known[leader]
        return moved

    monkeypatch.setattr(Scheduler, "share_prefixes", too_early)
    assert beside_siblings("none", 7, 2)[0] != alone


@pytest.mark.parametrize("steps", [1, 3])
def test_a_request_whose_prefix_source_is_cancelled_prefills_its_prompt(steps):
    target = double_target()
    engine = Engine(target, slots=3, chunk=7)
    requests = [engine.submit(prompt, max_new_tokens=9) for prompt in SIBLINGS[:3]]
    for _ in range(steps):
        engine.step()
    requests[0].cancel()
    engine.submit([3, 3], max_new_tokens=9)  # in its slot
    engine.run()
    expected = generate(target, None, SIBLINGS[:1], max_new_tokens=9).tokens[0]
    assert [request.tokens for request in requests[1:]] == [expected] * 2


def test_a_text_says_why_it_ended(target):
    plain = generate(target, None, [[1, 2, 3]], max_new_tokens=10, eos_token_ids=())
    assert plain.finish_reasons == ["length"]
    eos = plain.tokens[0][5]
    assert generate(target, None, [[1, 2, 3]], max_new_tokens=10, eos_token_ids=eos).finish_reasons == ["eos"]
    end = generate(target, None, [[1] * (target.context_length - 3)], eos_token_ids=())
    assert (end.finish_reasons, len(end.tokens[0])) == (["context"], 3)
    both = generate(target, None, [[1] * (target.context_length - 3)], max_new_tokens=3, eos_token_ids=())
    assert both.finish_reasons == ["length"]


def test_a_request_is_cancelled_from_its_callback_and_its_slot_is_free(target):
    engine, seen = Engine(target, slots=1), []

    def enough(new, drafted):
        seen.extend(new)
        if len(seen) >= 3:
            first.cancel()

    first = engine.submit([1, 2, 3], max_new_tokens=50, on_step=enough)
    waiting, second = engine.submit([4], max_new_tokens=5), engine.submit([5], max_new_tokens=4)
    waiting.cancel()
    engine.run()
    assert (first.finish_reason, first.tokens) == ("cancelled", seen)
    assert len(seen) == 3
    assert (waiting.finish_reason, waiting.tokens) == ("cancelled", [])
    assert second.tokens == generate(target, None, [[5]], max_new_tokens=4).tokens[0]


def test_an_interrupted_step_leaves_no_reusable_prefix(target, monkeypatch):
    """An interrupted prefill has overwritten old keys; an interrupted step leaves the device ahead of the host."""
    engine = Engine(target, slots=1)
    (first,) = engine.generate([[1, 2, 3, 4]], max_new_tokens=12).tokens
    text = [1, 2, 3, 4, *first]
    expected = generate(target, None, [text], max_new_tokens=12).tokens
    extend = target.extend
    for passes in (1, 3):
        left = [passes]

        def interrupted(*given, left=left, **counts):
            hidden = extend(*given, **counts)
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            return hidden

        with monkeypatch.context() as patch:
            patch.setattr(target, "extend", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.generate([[1, 2, 9, 9, 9, 9, 9, 9, 9]])
        assert engine.generate([text], max_new_tokens=12).tokens == expected


@pytest.mark.parametrize("name", others_in_soak("none", "model-tree", "attention-chain", "block-chain"))
def test_the_cache_grows_for_completions_beyond_the_reserved_tokens(name, monkeypatch):
    target = double_target()
    prompts = [[3, 1, 4], [1, 5], [9, 2, 6, 5]]
    how = {"sampling": Sampling(0.8), "max_new_tokens": [40, 5, 60]}
    expected = generate(target, make_drafter(name, target), prompts, **how)
    monkeypatch.setattr("speculator.decoding.rows.RESERVED_NEW_TOKENS", 4)
    engine = Engine(target, make_drafter(name, target), slots=2)
    assert engine.generate(prompts, **how).tokens == expected.tokens
    assert engine.cache.capacity < 2 * target.context_length


@pytest.mark.parametrize("name", ["none", "head-tree"])
def test_token_logprobs_are_the_targets_own(name):
    """Every new token has one, also in a cut step; a batch-mate that asks for none gets none."""
    target = double_target()
    engine = Engine(target, make_drafter(name, target), slots=2)
    asked = engine.submit([3, 1, 4], Sampling(0.8), max_new_tokens=23, logprobs=2)
    other = engine.submit([1, 5], Sampling(0.8, seed=1), max_new_tokens=30)
    engine.run()
    assert (other.token_logprobs, len(asked.token_logprobs)) == ([], 23)
    with torch.no_grad():
        logits = target.model(torch.tensor([asked.sequence]), use_cache=False).logits[0, 2:-1]
    for row, token, score in zip(logits.log_softmax(-1), asked.tokens, asked.token_logprobs, strict=True):
        best = row.topk(2)
        assert score.logprob == pytest.approx(float(row[token]))
        assert [each for each, _ in score.top] == best.indices.tolist()
        assert [value for _, value in score.top] == pytest.approx(best.values.tolist())


def test_cancelled_requests_leave_the_queue_while_no_slot_is_free(target):
    engine = Engine(target, slots=1)
    running = engine.submit([1, 2, 3], max_new_tokens=20, eos_token_ids=())
    engine.step()
    cancelled, kept = (engine.submit([4, 5, 6], max_new_tokens=2, eos_token_ids=()) for _ in range(2))
    cancelled.cancel()
    engine.step()
    assert running.finish_reason is None
    assert list(engine.waiting) == [kept]


def test_a_prompt_far_beyond_the_trained_length_is_logged_once(target, caplog):
    engine_module._warn_of_length.cache_clear()
    head = tiny_head()
    head.config.trained_length = 4
    engine = Engine(target, HeadDrafter(head), slots=2)
    engine.generate([[1] * 16], max_new_tokens=2)
    assert not caplog.records
    engine.generate([[1] * 17, [2] * 20], max_new_tokens=2)
    Engine(target, HeadDrafter(head)).generate([[1] * 17], max_new_tokens=2)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


INTERRUPTED = {"plain": ("process", "start_decoding"), "mlp": ("on_step", "commit")}
INTERRUPTED |= {"eagle3": ("start_decoding", "commit"), "ngram": ("process", "on_step")}


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        pytest.param(kind, where, marks=[pytest.mark.soak] * (where not in places))
        for kind, places in INTERRUPTED.items()
        for where in ("process", "on_step", "start_decoding", "commit")
    ],
)
def test_texts_go_on_as_they_are_after_an_interrupt(target, kind, where):
    heads = {"mlp": tiny_head(), "eagle3": tiny_head(architecture="eagle3")}
    drafter = {"plain": None, "ngram": NgramDrafter(3)}.get(kind) if kind not in heads else HeadDrafter(heads[kind], 3)
    sampling = Sampling(1.0, seed=5)
    expected = generate(target, drafter, PROMPTS, sampling, max_new_tokens=20).tokens
    engine, calls = Engine(target, drafter, slots=3), []

    def interrupt(*arguments):
        calls.append(arguments)
        if len(calls) in (1, 4):
            raise KeyboardInterrupt
        return whole(*arguments)

    whole = (lambda *_: None) if where == "on_step" else getattr(engine, where)
    if where != "on_step":
        setattr(engine, where, interrupt)
    requests = [
        engine.submit(
            prompt, Sampling(1.0, seed=5 + row), max_new_tokens=20, on_step=interrupt if where == "on_step" else None
        )
        for row, prompt in enumerate(PROMPTS)
    ]
    interrupts = 0
    while engine.busy:
        try:
            engine.run()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts
    assert [request.tokens for request in requests] == expected


def test_the_cache_never_grows_beyond_the_longest_text(target):
    """What `speculator serve` prints at its start is the most that it will need."""
    engine = Engine(target)
    for length, new in ((60, 2), (100, 2), (120, 2), (60, 1000)):  # 1.5 times the second's room is beyond the context
        engine.submit([1] * length, max_new_tokens=new)
        engine.run()
        assert length < engine.rows.cache.capacity <= engine.target.context_length + engine.rows._spare_positions
