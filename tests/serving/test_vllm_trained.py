"""Trained heads draft and accept the same in vLLM 0.32 and in our decoder."""

import copy
from itertools import pairwise

from serving.shared import TARGET, equal_tokens, our_steps, own_steps, per_position, vllm_runs

from data.mixture import PYTHON_SOURCES
from eval.intervals import paired_bootstrap
from eval.suites import held_out
from speculator import Target, generate, load_head
from speculator.__main__ import main
from speculator.tables import shown

SOURCES = ("train", "data", "eval")
PROMPTS, NEW, LENGTH = 40, 96, 3
EXAMPLE = TARGET.parent / "smollm2_135m_instruct"
QUESTIONS = (
    "Why is the sky blue?",
    "Write a Python function that reverses a list.",
    "A shop sells 12 apples for 3 dollars. How much are 40 apples?",
    "Write a short story about the keeper of a lighthouse.",
)
SETTINGS = {  # changes to configs/quickstart.yaml
    "speculator.architecture": "eagle3",
    "speculator.n_predict": LENGTH,
    "speculator.draft_vocab_size": 2000,
    "data.max_tokens": 400_000,
    "stage1.max_steps": 400,
    "stage1.learning_rate": 2e-3,
    "stage1.warmup_steps": 40,
    "stage1.eval_steps": 100,
    "stage1.save_steps": 100,
    "stage2.max_steps": 0,
    "eval.validation_prompts": 4,
    "eval.tune_prompts": 0,
    "eval.max_prompts": 1,
    "eval.max_new_tokens": 16,
    "report_to": "none",
}


def counted(steps: list[list[int]]) -> list[int]:
    """Number of drafts, then of accepted tokens at each position."""
    return [sum(map(len, steps)), *per_position(steps, LENGTH)]


def rates(counts: list[int]) -> list[float]:
    """Acceptance rate of each position, conditional on the position before it."""
    return [after / max(before, 1) for before, after in pairwise(counts)]


def within(found: list[float], intervals: list[dict]) -> bool:
    return all(each["low"] <= rate <= each["high"] for rate, each in zip(found, intervals, strict=True))


def test_acceptance_per_position_equals_ours(tmp_path, run_in, report, train):
    run = train([f"--{name}={value}" for name, value in SETTINGS.items()])
    flags = ["--speculator", str(run / "speculator"), "--format", "eagle3", "--output", str(tmp_path / "head")]
    assert main(["export", *flags]) == 0
    target = Target.load(str(TARGET), dtype="float32")
    prompts = held_out(PYTHON_SOURCES, target.tokenizer, 64, PROMPTS).prompts
    texts = generate(target, None, prompts, max_new_tokens=NEW, eos_token_ids=()).tokens
    runs = [[{"prompt": prompt, "max_new_tokens": NEW} for prompt in prompts]]
    speculative = {"method": "eagle3", "model": str(tmp_path / "head"), "num_speculative_tokens": LENGTH}
    (theirs,) = vllm_runs(run_in, tmp_path, runs, speculative, engine={"max_model_len": 512, "max_num_seqs": 8})
    same = sum(a == b for a, b in zip(texts, theirs["texts"], strict=True))

    head = load_head(run / "speculator", target)
    steps = our_steps(target, head, LENGTH, prompts, [NEW] * PROMPTS)
    ours, counts = counted(steps), [int(theirs["spec_decode_num_drafts"]), *map(int, theirs["accepted"])]
    intervals = [paired_bootstrap(steps, lambda some, i=i: rates(counted(some))[i]) for i in range(LENGTH)]
    report(f"{same} of {PROMPTS} texts identical; drafts and accepted per position: vLLM {counts}, ours {ours}")
    by_position = ", ".join(f"{rate:.3f}" for rate in rates(counts))
    report(f"acceptance by position: vLLM {by_position}, ours {', '.join(shown(each, '.3f') for each in intervals)}")
    assert len(prompts) == same == PROMPTS
    assert within(rates(counts), intervals)
    assert counts == ours

    # The intervals are narrow enough to notice a head that feeds back another state than in training.
    wrong = copy.deepcopy(head)
    wrong.config.norm_output = False
    assert not within(rates(counted(our_steps(target, wrong, LENGTH, prompts, [NEW] * PROMPTS))), intervals)


def test_the_head_of_the_examples_drafts_the_same_tokens(tmp_path, run_in, report, smollm2):
    flags = ["--speculator", str(EXAMPLE), "--format", "eagle3", "--output", str(tmp_path / "head")]
    assert main(["export", *flags]) == 0
    target = Target.load(str(smollm2), dtype="float32")
    head = load_head(EXAMPLE, target)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    template = target.tokenizer.apply_chat_template
    prompts = [list(template(chat, add_generation_prompt=True, return_dict=False)) for chat in chats]
    runs = [[{"prompt": prompt, "max_new_tokens": NEW}] for prompt in prompts]
    speculative = {"method": "eagle3", "model": str(tmp_path / "head"), "num_speculative_tokens": LENGTH}
    engine = {"max_model_len": 512, "max_num_seqs": 1, "enable_prefix_caching": False}
    made = vllm_runs(run_in, tmp_path, runs, speculative, engine=engine, target=str(smollm2))
    same = drafted = 0
    for prompt, theirs in zip(prompts, made, strict=True):
        ours, _, text = own_steps(target, head, LENGTH, prompt, NEW)
        assert theirs["texts"] == [text]
        # The text may end inside the last step; vLLM may draft once more then.
        assert abs(len(ours) - len(theirs["drafts"])) <= 1
        equal, of = equal_tokens(ours, theirs["drafts"])
        same, drafted = same + equal, drafted + of
    report(f"the head of the examples: {len(prompts)} texts identical, {same} of {drafted} drafted tokens equal")
    assert same == drafted > 0
