from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import VOCAB, tiny_head, tiny_model, tiny_tokenizer
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxTimeCriteria,
    StopStringCriteria,
)
from transformers.generation import TemperatureLogitsWarper

from speculator import (
    HeadDrafter,
    MLPSpeculator,
    MLPSpeculatorConfig,
    NgramDrafter,
    Target,
    Tree,
    UserError,
    generate,
)
from speculator.custom_generate import speculative
from speculator.kernels.fused_norms import fuse_norms, restore_norms

PAD = 0
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [27, 18], [1, 4, 1, 4, 2]]
COUNT = 24


@pytest.fixture
def model():
    return tiny_model()


def left_padded(prompts) -> dict[str, torch.Tensor]:
    width = max(map(len, prompts))
    pads = [width - len(prompt) for prompt in prompts]
    return {
        "input_ids": torch.tensor([[PAD] * n + prompt for n, prompt in zip(pads, prompts, strict=True)]),
        "attention_mask": torch.tensor([[0] * n + [1] * (width - n) for n in pads]),
    }


def drafters():
    head = tiny_head()
    return [head, HeadDrafter(head, Tree([3, 2, 2], 8)), NgramDrafter()]


def test_calls_in_several_threads_wait_for_each_other(model):
    settings = dict(max_new_tokens=COUNT, do_sample=False, pad_token_id=PAD)  # noqa: C408
    expected = model.generate(**left_padded(PROMPTS[:1]), **settings)
    before = model.config._attn_implementation

    def call(_) -> torch.Tensor:
        return model.generate(**left_padded(PROMPTS[:1]), **settings, custom_generate=speculative(NgramDrafter()))

    with ThreadPoolExecutor(4) as threads:
        assert all(torch.equal(made, expected) for made in threads.map(call, range(12)))
    assert model.config._attn_implementation == before


def test_engines_of_a_target_in_several_threads_wait_for_each_other():
    """The probe leaves Gemma 2's logits to the model's own code, whose body is replaced for them."""
    target = Target(tiny_model("gemma2"), tiny_tokenizer())
    expected = [generate(target, None, [prompt], max_new_tokens=COUNT).tokens for prompt in PROMPTS]
    with ThreadPoolExecutor(4) as threads:
        made = threads.map(lambda prompt: generate(target, None, [prompt], max_new_tokens=COUNT).tokens, PROMPTS * 4)
        assert list(made) == expected * 4


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["alone", "left-padded"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_greedy_text_equals_generate(family, prompts):
    model, inputs = tiny_model(family), left_padded(prompts)
    settings = dict(max_new_tokens=COUNT, do_sample=False, pad_token_id=PAD)  # noqa: C408
    expected = model.generate(**inputs, **settings)
    for drafter in drafters():
        made = model.generate(**inputs, **settings, custom_generate=speculative(drafter))
        assert made.dtype == torch.long
        assert torch.equal(made, expected)
    assert torch.equal(model.generate(**inputs, **settings), expected)  # the model is as before


def test_a_row_that_ends_early_is_padded_on_the_right(model):
    inputs = left_padded(PROMPTS)
    plain = model.generate(**inputs, max_new_tokens=COUNT, do_sample=False, pad_token_id=PAD)[:, -COUNT:]
    for pad in (PAD, None):  # without a pad token transformers takes the first end token
        ends = [plain[0, 3].item(), plain[1, 9].item()]
        settings = dict(max_new_tokens=COUNT, do_sample=False, eos_token_id=ends, pad_token_id=pad)  # noqa: C408
        expected = model.generate(**inputs, **settings)
        assert len({tuple(row[-2:].tolist()) for row in expected}) > 1
        assert torch.equal(model.generate(**inputs, **settings, custom_generate=speculative(tiny_head())), expected)
    model.generation_config.eos_token_id = ends
    only_other = {**settings, "eos_token_id": [31], "pad_token_id": PAD}  # the call's, not the model's
    expected = model.generate(**inputs, **only_other)
    assert torch.equal(model.generate(**inputs, **only_other, custom_generate=speculative(tiny_head())), expected)


def test_stop_strings_end_a_row(model):
    tokenizer = tiny_tokenizer()
    ids = torch.tensor([PROMPTS[0]])
    plain = model.generate(ids, max_new_tokens=COUNT, do_sample=False)[0, ids.shape[1] :].tolist()
    stop = StopStringCriteria(tokenizer, [tokenizer.decode(plain[7])])
    settings = dict(max_new_tokens=COUNT, do_sample=False, stopping_criteria=[stop])  # noqa: C408
    expected = model.generate(ids, **settings)
    assert expected.shape[1] < ids.shape[1] + COUNT
    assert torch.equal(
        model.generate(ids, **settings, custom_generate=speculative(tiny_head(), None, tokenizer)), expected
    )
    with pytest.raises(UserError, match="tokenizer"):
        model.generate(ids, **settings, custom_generate=speculative(tiny_head()))


def test_a_stop_string_may_begin_in_the_prompt(model):
    tokenizer = tiny_tokenizer()
    ids = torch.tensor([PROMPTS[0]])
    whole = model.generate(ids, max_new_tokens=COUNT, do_sample=False)[0].tolist()
    stop = StopStringCriteria(tokenizer, [tokenizer.decode(whole[ids.shape[1] - 2 : ids.shape[1] + 1])])
    settings = dict(max_new_tokens=COUNT, do_sample=False, stopping_criteria=[stop])  # noqa: C408
    made = model.generate(ids, **settings, custom_generate=speculative(tiny_head(), None, tokenizer))
    assert made.tolist() == model.generate(ids, **settings).tolist() == [whole[: ids.shape[1] + 1]]


def test_max_length_counts_the_prompt(model):
    ids = torch.tensor([PROMPTS[0]])
    assert model.generate(ids, max_length=12, custom_generate=speculative(tiny_head())).shape == (1, 12)


def test_sampling_follows_torchs_seed(model):
    ids = torch.tensor([PROMPTS[0]])
    drafted = speculative(tiny_head())

    def sample(**settings) -> list[list[int]]:
        return model.generate(ids, do_sample=True, max_new_tokens=COUNT, custom_generate=drafted, **settings).tolist()

    torch.manual_seed(7)
    first, second = sample(), sample()
    torch.manual_seed(7)
    assert [sample(), sample()] == [first, second]
    assert first != second
    rows = sample(num_return_sequences=3)
    assert len({tuple(row) for row in rows}) == 3


def test_sampling_settings_apply(model):
    """Each setting leaves only the most likely token, which is greedy decoding."""
    ids = torch.tensor([PROMPTS[0]])
    expected = model.generate(ids, max_new_tokens=COUNT, do_sample=False)
    for settings in ({"temperature": 1e-4}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.999}):
        made = model.generate(
            ids, max_new_tokens=COUNT, do_sample=True, **settings, custom_generate=speculative(tiny_head())
        )
        assert torch.equal(made, expected), settings
    free = model.generate(ids, max_new_tokens=COUNT, do_sample=True, custom_generate=speculative(tiny_head()))
    assert not torch.equal(free, expected)


def test_a_head_may_be_given_as_its_folder(model, tmp_path):
    tiny_head().save_pretrained(tmp_path)
    ids = torch.tensor([PROMPTS[0]])
    expected = model.generate(ids, max_new_tokens=COUNT, do_sample=False)
    drafted = speculative(tmp_path)
    for _ in range(2):
        made = model.generate(ids, max_new_tokens=COUNT, do_sample=False, custom_generate=drafted)
        assert torch.equal(made, expected)
    with pytest.raises(UserError, match="nowhere"):
        model.generate(ids, max_new_tokens=COUNT, custom_generate=speculative("nowhere"))


def test_the_model_is_left_unchanged(model):
    model.train()
    model.model.layers[0].eval()
    model.lm_head.weight.requires_grad_(False)
    before = state_of(model)
    ids = torch.tensor([PROMPTS[0]])
    drafted = speculative(tiny_head())
    for _ in range(2):
        model.generate(ids, max_new_tokens=4, custom_generate=drafted)
        assert state_of(model) == before
    with pytest.raises(UserError, match="does not fit"):
        model.generate(ids, max_new_tokens=4, custom_generate=speculative(tiny_head(), rule="multi_candidate"))
    assert state_of(model) == before
    with pytest.raises(UserError, match="nowhere"):
        model.generate(ids, max_new_tokens=4, custom_generate=speculative("nowhere"))
    assert state_of(model) == before


def test_a_target_of_the_same_model_decodes_as_before(model):
    """Rows of unequal lengths and a tree: transformers' own attention would see what lies beyond a row's end."""
    target = Target(model, tokenizer=None)
    drafter = HeadDrafter(tiny_head(), Tree([4, 2, 2], 8))
    before = [generate(target, each, PROMPTS, max_new_tokens=COUNT).tokens for each in (None, drafter)]
    assert before[0] == before[1]
    ids = torch.tensor([PROMPTS[0]])
    made = model.generate(ids, max_new_tokens=COUNT, do_sample=False, custom_generate=speculative(drafter))
    assert made[0, len(PROMPTS[0]) :].tolist() == before[0][0]
    assert [generate(target, each, PROMPTS, max_new_tokens=COUNT).tokens for each in (None, drafter)] == before


def test_norms_that_were_fused_get_their_class_back(model):
    before = state_of(model)
    fused = fuse_norms(model)
    assert len(fused) == 5
    assert state_of(model) != before
    restore_norms(fused)
    assert state_of(model) == before


def _merge_adapter(model) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False, lora_alpha=400)
    peft.get_peft_model(model, config).merge_and_unload()


def _step(model) -> None:
    model.requires_grad_(True)
    model(torch.tensor(PROMPTS[:1])).logits.logsumexp(-1).sum().backward()
    torch.optim.AdamW(model.parameters(), 0.1, fused=True).step()


@torch.no_grad()
def _replace_output(model) -> None:
    model.lm_head = torch.nn.Linear(*reversed(model.lm_head.weight.shape), bias=False)


@pytest.mark.parametrize(
    "change", [_step, lambda model: model.lm_head.weight.data.neg_(), _merge_adapter, _replace_output]
)
def test_weights_that_changed_between_calls_are_used(monkeypatch, change):
    """A fused optimizer, `data` and merged adapters leave address and version of a weight as they were."""
    monkeypatch.setattr("speculator.kernels.linear._MIN_MULTIPLICATIONS_PACKED", 0)
    model = tiny_model()
    settings = dict(max_new_tokens=COUNT, do_sample=False)  # noqa: C408
    ids, drafted = torch.tensor([PROMPTS[0]]), speculative(NgramDrafter())
    before = model.generate(ids, **settings, custom_generate=drafted)
    change(model)
    after = model.generate(ids, **settings)
    assert not torch.equal(before, after)
    assert torch.equal(model.generate(ids, **settings, custom_generate=drafted), after)


def state_of(model) -> list:
    """Return everything that a `Target` changes."""
    modules = list(model.modules())
    return [
        [(type(module), module.training, sorted(vars(module))) for module in modules],
        [(parameter.data_ptr(), parameter._version, parameter.requires_grad) for parameter in model.parameters()],
        (model.config._attn_implementation, model.config.to_dict(), model.generation_config.to_dict()),
    ]


@pytest.mark.parametrize("size", [{"vocab_size": 40}, {"emb_dim": 16}])
def test_a_head_of_another_size_is_refused(size):
    head = MLPSpeculator(MLPSpeculatorConfig(**{"vocab_size": VOCAB, "emb_dim": 32, "inner_dim": 8} | size))
    with pytest.raises(UserError, match="the head"):
        tiny_model().generate(torch.tensor([PROMPTS[0]]), custom_generate=speculative(head))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"repetition_penalty": 1.2}, "RepetitionPenaltyLogitsProcessor; .* pass repetition_penalty=1.0"),
        ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor"),
        ({"num_beams": 2}, "beam search"),
        ({"top_k": 4, "penalty_alpha": 0.6}, "contrastive search"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"stopping_criteria": [MaxTimeCriteria(9.0)]}, "MaxTimeCriteria"),
        ({"position_ids": torch.arange(2, 10)[None]}, "position_ids"),
    ],
)
def test_unsupported_settings_are_refused_by_name(model, settings, message):
    with pytest.raises(UserError, match=message):
        model.generate(
            torch.tensor([PROMPTS[0]]), max_new_tokens=4, **settings, custom_generate=speculative(tiny_head())
        )


def test_the_users_logits_processor_applies(model):
    ids = torch.tensor([PROMPTS[0]])
    config = GenerationConfig(max_new_tokens=COUNT, do_sample=True, top_k=0)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(1e-4)])
    made = model.generate(
        ids, generation_config=config, logits_processor=warpers, custom_generate=speculative(tiny_head())
    )
    assert torch.equal(made, model.generate(ids, max_new_tokens=COUNT, do_sample=False))


def test_rows_of_unequal_length_need_a_pad_token(model):
    context = model.config.max_position_embeddings
    inputs = left_padded([[1] * (context - 4), [1, 2]])
    with pytest.raises(UserError, match="pad_token_id"):
        model.generate(**inputs, max_new_tokens=8, custom_generate=speculative(tiny_head()))
