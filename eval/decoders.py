"""The ways to decode that a report compares: the built-in loop with each drafter, and transformers' own generate."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, CompileConfig

from eval.speed import Engines, Timed, time_ours, time_transformers
from speculator.drafters import Drafter, HeadDrafter, ModelDrafter, NgramDrafter
from speculator.heads import Speculator
from speculator.sampling import Sampling
from speculator.target import Target

BASELINES = {
    "same_loop": "plain decoding, same loop",
    "hf_generate": "transformers generate",
    "hf_compiled": "transformers generate, static cache, compiled",
    "hf_prompt_lookup": "transformers prompt lookup",
    "hf_assisted": "transformers assisted generation",
}
"""Every name that a speed can be told over, and how a table calls it."""

OPTIONAL = tuple(BASELINES)[2:]
_LONE = ("hf_prompt_lookup", "hf_assisted")  # transformers does these for one prompt at a time


@dataclass
class Decoder:
    """One way to decode.

    Attributes:
        key: "none", "head", "head 2", "ngram", "model" or the name of a baseline.
        run: (prompts, sampling, new tokens, where to note it, tokens that end a text).
        drafter: who drafts in the built-in loop.
        ours: it is the built-in loop.
        rule: the accept rule above temperature 0; None: the drafter's own.
    """

    key: str
    run: Callable[[list[list[int]], Sampling, int, Timed, Sequence[int]], None]
    drafter: Drafter | None = None
    ours: bool = True
    rule: str | None = None


def decoders(
    target: Target,
    head: Speculator | None,
    draft_lengths: Sequence[int],
    model: Target | None,
    baselines: Collection[str],
    batch_size: int,
    engines: Engines | None = None,
    rule: str | None = None,
) -> tuple[list[Decoder], dict[str, str]]:
    """What runs, and why what was asked for does not: the plain loop first, then drafters, then transformers.

    Args:
        head: left out where there is none.
        draft_lengths: of the head's chains; the first is the one that is called "head".
        model: a draft model.
        baselines: of `OPTIONAL`.
        batch_size: some can only do one prompt at a time.
        engines: see `time_ours`; given where other decoders of the built-in loop are compared with these.
        rule: the accept rule of every drafter; None: each has its own.
    """
    length = draft_lengths[0]
    drafters: dict[str, Drafter | None] = {"none": None}
    for number, each in enumerate(draft_lengths if head else []):
        assert head is not None
        drafters[f"head {each}" if number else "head"] = HeadDrafter(head, each)
    drafters["ngram"] = NgramDrafter(length)
    if model is not None:
        drafters["model"] = ModelDrafter(model, target, length)
    engines = {} if engines is None else engines
    table = [decoder_of(target, key, drafter, engines, rule) for key, drafter in drafters.items()]

    settings: dict[str, dict] = {
        "hf_generate": {},
        "hf_compiled": {"cache_implementation": "static", "compile_config": _compile_config()},
        "hf_prompt_lookup": {"prompt_lookup_num_tokens": length, "max_matching_ngram_size": 3},
    }
    skipped: dict[str, str] = {}
    if "hf_assisted" in baselines and model is not None:
        settings["hf_assisted"] = _assistant(model, length)
    elif "hf_assisted" in baselines:
        skipped["hf_assisted"] = "it needs a draft model"
    for key, how in settings.items():
        if key != "hf_generate" and key not in baselines:
            continue
        if batch_size > 1 and key in _LONE:
            skipped[key] = "transformers does this for one prompt at a time"
            continue
        table.append(_theirs(target, key, how))
    return table, skipped


def decoder_of(target: Target, key: str, drafter: Drafter | None, engines: Engines, rule: str | None = None) -> Decoder:
    """The built-in loop with a drafter, or without; `engines`: see `time_ours`, the same for all that are compared."""

    rule = rule if drafter else None

    def run(prompts, sampling, count, out, stop_at) -> None:
        time_ours(target, drafter, prompts, sampling, count, out, rule=rule, stop_at=stop_at, engines=engines)

    return Decoder(key, run, drafter, rule=rule)


def _theirs(target: Target, key: str, how: dict) -> Decoder:
    def run(prompts, sampling, count, out, stop_at) -> None:
        time_transformers(target, prompts, sampling, count, out, stop_at, **how)

    return Decoder(key, run, ours=False)


def _compile_config() -> CompileConfig:
    """transformers compiles on accelerators alone, unless it is told to anywhere."""
    config = CompileConfig()
    if not torch.accelerator.is_available():
        config.mode = "default"  # the other modes are about CUDA graphs
        config._compile_all_devices = True
    return config


def _assistant(model: Target, length: int) -> dict:
    """A fixed draft length, as ours is: no confidence threshold, no schedule. A copy, which attends in its own way."""
    assistant = AutoModelForCausalLM.from_pretrained(model.name, dtype=model.dtype, trust_remote_code=False)
    assistant = assistant.to(model.device)
    fixed = {"num_assistant_tokens": length, "num_assistant_tokens_schedule": "constant"}
    assistant.generation_config.update(**fixed, assistant_confidence_threshold=0.0)
    return {"assistant_model": assistant, **fixed}
