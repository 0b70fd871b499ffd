"""MTP layers: drafts follow transformers' own form of them, the training form is the drafting form."""

import pytest
import torch
from conftest import tiny_model, tiny_mtp_head
from mtp_models import config_of, head_of, model_of, mtp_of, naive
from transformers import DeepseekV32Config, LongcatFlashConfig, NemotronHConfig

from speculator import Candidates, Chain, Target, Tree
from speculator.decoding.engine import Engine
from speculator.errors import UserError
from speculator.heads import MTPSpeculator, MTPSpeculatorConfig
from speculator.heads.attention.levels import LevelSource
from speculator.heads.mtp.model import Joint, MTPForm
from tests.speculator.heads.test_eagle3_drafting import Noted, largest_gap, trained_form

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9], [3, 1, 4, 1, 5, 9, 2, 6]]
LIMITS = [7, 3, 5, 6]


def case(family: str, **options):
    """A target, transformers' MTP model, and our head with its weights."""
    model = model_of(config_of(family))
    mtp = mtp_of(model)
    target = Target(model, tokenizer=None)
    return target, mtp, head_of(target, mtp, **options)


def drafted(target, head, shape, slots: int = 3, chunk: int = 3, temperature: float = 0.0) -> Noted:
    """Drafts while requests join, leave, and reuse prefixes; their text is checked."""
    drafter = Noted(head, shape)
    engine = Engine(target, drafter, slots=slots, chunk=chunk)
    first = engine.generate(PROMPTS, max_new_tokens=LIMITS).tokens
    turns = [prompt + said + [1, 2] for prompt, said in zip(PROMPTS, first, strict=True)]
    second = engine.generate(turns, max_new_tokens=3).tokens
    plain = Engine(target, None, slots=3)
    assert first == plain.generate(PROMPTS, max_new_tokens=LIMITS).tokens
    assert second == plain.generate(turns, max_new_tokens=3).tokens
    return drafter


def gap(drafter: Noted, expected_of) -> float:
    assert len(drafter.log) > 30
    return largest_gap(drafter.log, expected_of)


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("glm4_moe", Chain(3)),
        ("deepseek_v3", Tree((2, 2, 1), nodes=5)),
        ("mellum", Tree((2, 2, 1), nodes=5)),
        ("qwen3_5", Candidates((2, 2, 1))),
        ("glm_ocr", Tree((2, 2, 1), nodes=5)),
        *(
            pytest.param(family, Chain(3), marks=pytest.mark.soak)
            for family in ("qwen3_5_moe", "qwen3_next", "glm4_moe_lite", "hy_v3", "exaone_moe", "bailing_hybrid")
        ),
        pytest.param("glm4_moe", Tree((2, 2, 1, 1), nodes=7), marks=pytest.mark.soak),
    ],
)
def test_drafts_are_those_of_transformers_layers_run_on_whole_rows(family, shape):
    target, mtp, head = case(family)
    assert gap(drafted(target, head, shape), lambda drafts: naive(target, mtp, drafts)) < 1e-4


@pytest.mark.parametrize(
    ("family", "options"),
    [("glm4_moe", {}), ("deepseek_v3", {"zero_first": True, "recycle_normed": False}), ("mellum", {})],
)
def test_the_training_form_equals_the_drafting_form(family, options):
    """In float64, but for norms, rope and routers, which compute in float32 whatever the dtype."""
    target = Target(model_of(config_of(family)).double(), tokenizer=None)
    head = head_of(target, mtp_of(target.model).double(), **options)
    drafter = drafted(target, head, Chain(head.n_predict) if options else Tree((2, 1, 1), nodes=4))
    assert gap(drafter, lambda drafts: trained_form(target, head, drafts)) < 1e-6


# ---- known-wrong variants


def before_the_norm(target, head, monkeypatch):
    """The layer's own norm undoes the division by the target's scale, so it sees what the target's norm saw."""
    monkeypatch.setattr(LevelSource, "prefill", _scaled(LevelSource.prefill, 4, 1 / target.model.model.norm.weight))
    monkeypatch.setattr(LevelSource, "commit", _scaled(LevelSource.commit, 2, 1 / target.model.model.norm.weight))


def _scaled(own, place, scale):
    def scaled(*given):
        return own(*given[:place], given[place] * scale, *given[place + 1 :])

    return scaled


def state_first(target, head, monkeypatch):
    for layer in head.layers:
        layer.eh_proj.weight.data = layer.eh_proj.weight.data.roll(target.hidden_size, 1)


def one_token_late(target, head, monkeypatch):
    own = MTPForm.read

    def late(self, cache, states, tokens, counts):
        return own(self, cache, states, tokens.roll(1, 1), counts)

    monkeypatch.setattr(MTPForm, "read", late)


def zeroing(target, head, monkeypatch):
    head.config.zero_first = True


def recycling_before_the_norm(target, head, monkeypatch):
    head.config.recycle_normed = False


def stale_keys(target, head, monkeypatch):
    """The keys of drafted tokens stay, though the text was read: the accepted ones were made from recycled states."""
    own = MTPForm.read

    def keeping(self, cache, *given):
        drafts = cache.keys.clone(), cache.values.clone()
        made = own(self, cache, *given)
        if cache.longest > 12:
            for now, before in zip((cache.keys, cache.values), drafts, strict=True):
                now[:, :, :, 8:11] = before[:, :, :, 8:11]
        return made

    monkeypatch.setattr(MTPForm, "read", keeping)


WRONG = [before_the_norm, state_first, one_token_late, zeroing, recycling_before_the_norm, stale_keys]


@pytest.fixture(scope="module")
def glm():
    return case("glm4_moe")


@pytest.mark.parametrize("wrong", WRONG)
def test_known_wrong_variants_are_detected(glm, wrong, monkeypatch):
    target, mtp, head = glm
    weights, options = {name: x.clone() for name, x in head.state_dict().items()}, dict(vars(head.config))
    wrong(target, head, monkeypatch)
    try:
        drafter = Noted(head, Chain(2))
        Engine(target, drafter, slots=2).generate(PROMPTS, max_new_tokens=10)
        assert gap(drafter, lambda drafts: naive(target, mtp, drafts)) > 0.01
    finally:
        head.load_state_dict(weights)
        vars(head.config).update(options)


def test_training_with_each_steps_own_keys_only_is_detected(monkeypatch):
    """The form of attention that other trainers have."""
    target, _, head = case("glm4_moe")
    drafter = drafted(target, head, Chain(3))
    own = Joint.__call__

    def plain(self, *given):
        self.step = 0
        return own(self, *given)

    monkeypatch.setattr(Joint, "__call__", plain)

    def everywhere(text, path):
        row = torch.tensor([text[:-1]])
        tokens = torch.tensor([[*text[1:], *path, 0, 0, 0]])[:, : row.shape[1] + head.n_predict - 1]
        with torch.no_grad():
            return head.draft_logits(head.unrolled(target.hidden(row), tokens)[len(path)][0, -1])

    assert gap(drafter, lambda drafts: [everywhere(*draft) for draft in drafts]) > 0.01


# ---- the head itself


def test_a_routers_bias_stays_in_float32_and_is_not_trained():
    _, _, head = case("deepseek_v3")
    name = "layers.0.block.mlp.gate.e_score_correction_bias"
    before = head.get_buffer(name).clone()
    assert name not in dict(head.named_parameters())
    assert before.abs().max() > 0
    for dtype in (torch.bfloat16, torch.float64):
        head.to(dtype)
        assert head.layers[0].eh_proj.weight.dtype == dtype
        assert torch.equal(head.get_buffer(name), before)
        assert head.get_buffer(name).dtype == torch.float32


def test_a_target_whose_layers_need_more_than_states_fails_in_one_line():
    target = Target(tiny_model("gemma3n"), tokenizer=None)
    with pytest.raises(UserError, match="gemma3n_text"):
        tiny_mtp_head(target)


@pytest.mark.parametrize(
    ("kind", "why"),
    [(DeepseekV32Config, "indexer"), (LongcatFlashConfig, "num_hidden_layers"), (NemotronHConfig, "no attribute")],
)
def test_layers_that_other_parts_belong_to_fail_in_one_line(kind, why):
    with torch.device("meta"), pytest.raises(UserError, match=f"{kind.model_type}: .*{why}"):
        MTPSpeculator(MTPSpeculatorConfig.for_target(kind()))


def test_operations_follow_from_the_experts_that_a_token_is_sent_to():
    config = MTPSpeculatorConfig.for_target(config_of("glm4_moe"), n_predict=3)
    with torch.device("meta"):
        head = MTPSpeculator(config)
    block = head.layers[0].block
    experts = block.mlp.experts.gate_up_proj.numel() + block.mlp.experts.down_proj.numel()
    linear = sum(part.weight.numel() for part in head.modules() if isinstance(part, torch.nn.Linear))
    output = 2 * config.vocab_size * config.emb_dim // 3
    assert head.weights_per_token(64) == 3 * (linear + experts // 2 + output)  # two of four experts
