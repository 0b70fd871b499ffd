"""`data generate --server` with this project's server gives the rows of the local engine."""

import pytest
from chat_templates import chat_tokenizer
from serving_here import serving, tiny_head_for, tiny_target

from data.writers.engine import EngineWriter
from data.writers.server import ServerWriter, TextOnly
from data.writing import Writing
from speculator import HeadDrafter, Sampling
from speculator.prompts import Conversation


@pytest.mark.parametrize(
    "sampling", [pytest.param(Sampling(1.0), marks=pytest.mark.soak), Sampling(0.7, 50, 0.95), Sampling()]
)
def test_a_server_of_ours_gives_the_rows_of_the_engine_here(tmp_path, sampling):
    target = tiny_target(chat_tokenizer("qwen3"))
    drafter, tokenizer = HeadDrafter(tiny_head_for(target)), target.tokenizer
    prompts = [Conversation(tokenizer(f"def f{i}(x):" + " x +" * i)["input_ids"]) for i in range(12)]
    for i in range(3):
        messages = [{"role": "user", "content": f"What is {i} + 2?"}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        prompts.append(Conversation(ids, messages))
    how = Writing(samplings=(sampling,), max_new_tokens=24, seed=7)
    here = EngineWriter(target, drafter, 5).write(prompts, tmp_path / "here", how)
    with serving(target, drafter) as (url, _):
        served = TextOnly(name="tiny", tokenizer=tokenizer, context_length=target.context_length, urls=[url])
        there = ServerWriter(served, 6).write(prompts, tmp_path / "there", how)
    assert there.to_dict() == here.to_dict()
