import re
from dataclasses import asdict, fields, replace
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace

import pytest
import torch
from forked import finish, launch
from torch import nn
from torch.nn import functional as F

from speculator.errors import UserError
from speculator.heads import MLPSpeculator, MLPSpeculatorConfig
from speculator.heads.training import IGNORE, TrainingBatch, forecast_error, step_metrics
from speculator.heads.unrolled import UnrolledHead, align
from speculator.kernels.compiled import can_compile
from train import losses as losses_module
from train.losses import _CHUNK, ChunkedLoss, _adds_in_float32, chunk_tokens, d_pace, summarise
from train.options import config as config_module
from train.options import loss_table
from train.options.config import LossConfig

N, B, L, V, D, I = 2, 3, 8, 11, 6, 5  # noqa: E741
S = L - 2


def ones(x):
    return torch.ones_like(x)


def test_align_shows_the_shift_of_the_docstring():
    x = torch.arange(L)[None]
    assert align(x, torch.zeros_like(x), ones(x), N).tolist() == [[[2, 3, 4, 5, 6, 7], [3, 4, 5, 6, 7, IGNORE]]]


def test_no_label_crosses_a_document():
    x = torch.arange(L)[None]
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
    no = IGNORE
    assert align(x, documents, ones(x), N).tolist() == [[[2, 3, no, no, 6, 7], [3, no, no, no, 7, no]]]


def test_labels_are_inside_the_loss_mask_from_the_first_token_read():
    x = torch.arange(L)[None]
    speaks = torch.tensor([[0, 0, 0, 1, 1, 1, 0, 0]])
    no = IGNORE
    assert align(x, torch.zeros_like(x), speaks, N).tolist() == [[[no, no, 4, 5, no, no], [no, no, 5, no, no, no]]]


def measured(loss, labels, features, outputs, hidden, draft_tokens=None) -> dict:
    """Metrics' sums of a head with these features, the objective, and the number of labels."""
    head = SimpleNamespace(output=outputs.__getitem__, draft_tokens=draft_tokens, training=True)
    batch = TrainingBatch(
        input_ids=None,
        document_ids=labels,
        hidden=hidden,
        states=None,
        targets={"labels": labels},
    )
    metrics = UnrolledHead.measure(head, features, batch, loss)
    objective, _ = metrics.pop("objective")
    sums = {name: total for name, (total, _) in metrics.items()}
    return sums | {"objective": objective, "count": metrics["loss"][1], "metrics": metrics}


class Case:
    """A head's features and output matrices, and a target's states and lm_head, in float64."""

    def __init__(self, tied: bool = False, masked: bool = True, draft_tokens: list[int] | None = None):
        torch.manual_seed(0)  # of the matrices
        generator = torch.Generator().manual_seed(0)
        randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
        x = torch.randint(V, (B, L), generator=generator)
        mask = torch.rand(B, L, generator=generator) < (0.8 if masked else 1.1)
        self.labels = align(x, torch.zeros_like(x), mask, N)
        self.hidden, self.lm_head = randn(B, L, D), randn(V, D)
        self.features = [randn(B, S, I).requires_grad_() for _ in range(N)]
        self.draft_tokens = draft_tokens and torch.tensor(draft_tokens)
        size = len(draft_tokens or range(V))
        self.outputs = [nn.Linear(I, size, bias=False, dtype=torch.float64) for _ in range(1 if tied else N)]
        self.outputs = [self.outputs[min(i, len(self.outputs) - 1)] for i in range(N)]

    def measure(
        self,
        weights: LossConfig,
        chunk: int | None = None,
        compiled: bool = False,
    ) -> dict:
        loss = ChunkedLoss(lambda h: h @ self.lm_head.T, weights, V, chunk, compiled)
        return measured(loss, self.labels, self.features, self.outputs, self.hidden, self.draft_tokens)

    def naive(self, loss) -> torch.Tensor:
        """Sum of `loss(z, p, label)` over steps with all logits at once, by the alignment in `heads.unrolled`."""
        total = torch.zeros((), dtype=torch.float64)
        for i in range(N):
            z = self.outputs[i](self.features[i])
            teacher = self.hidden[:, i + 1 : i + 1 + S] @ self.lm_head.T
            each = loss(z, teacher, self.labels[:, i].clamp_min(0))
            total = total + (each * (self.labels[:, i] != IGNORE)).sum()
        return total

    def gradients(self, objective: torch.Tensor) -> list[torch.Tensor]:
        matrices = list({id(o): o.weight for o in self.outputs}.values())
        return list(torch.autograd.grad(objective, [*self.features, *matrices]))


def hard(z, teacher, label):
    return F.cross_entropy(z.flatten(0, 1), label.flatten(), reduction="none").view(label.shape)


def divergence(z, teacher, label):
    return F.kl_div(z.log_softmax(-1), teacher.softmax(-1), reduction="none").sum(-1)


def rejection(z, teacher, label):
    return 0.5 * (z.softmax(-1) - teacher.softmax(-1)).abs().sum(-1)


def hybrid(z, teacher, label):
    kept = 1 - rejection(z, teacher, label)
    share = torch.exp(-3 * kept.detach())
    return share * divergence(z, teacher, label) + (1 - share) * (1 - kept)


def mix(z, teacher, label):
    return 0.3 * hard(z, teacher, label) + 0.5 * divergence(z, teacher, label) + 2 * rejection(z, teacher, label)


CASES = {
    "cross-entropy": (LossConfig(cross_entropy=1, kl=0), hard),
    "kl": (LossConfig(kl=1), divergence),
    "total variation": (LossConfig(kl=0, total_variation=1), rejection),
    "lk": (LossConfig(kl=0, lk=1), hybrid),
    "mix": (LossConfig(cross_entropy=0.3, kl=0.5, total_variation=2), mix),
}


@pytest.mark.parametrize("chunk", [None, 1, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_chunked_loss_and_gradients_equal_the_naive_ones(name, tied, chunk):
    case, (weights, loss) = Case(tied), CASES[name]
    sums, expected = case.measure(weights, chunk), case.naive(loss)
    torch.testing.assert_close(sums["objective"], expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(sums["loss"].sum(), expected, rtol=0, atol=1e-9)
    for got, wanted in zip(case.gradients(sums["objective"] * 0.7), case.gradients(expected * 0.7), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-9)


ROOT = Path(__file__).parents[2]


def test_the_loss_of_the_contributors_page_is_trained_on(monkeypatch):
    """A function, a line of the table and a field are all that a loss needs, in the losses' only branch too."""
    from conftest import settled  # need the package datasets, which tests on a GPU do without

    from train.command_line import parse
    from train.door import checks

    function, line, field, test = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/contributing/add-a-loss.md").read_text(), re.DOTALL
    )
    names = {
        **vars(loss_table),
        **vars(config_module),
        "Tensor": torch.Tensor,
        "rejection": rejection,
        "CASES": {},
        "__name__": __name__,
    }
    exec(function, names)
    monkeypatch.setattr(loss_table, "LOSSES", loss_table.LOSSES | eval(f"{{{line}}}", names))
    monkeypatch.setattr(config_module, "LOSSES", loss_table.LOSSES)
    monkeypatch.setattr(checks, "LOSSES", loss_table.LOSSES)
    exec(f"@dataclass(frozen=True)\nclass More(LossConfig):\n{indent(field, '    ')}", names)
    exec(test, names | {"LossConfig": names["More"]})
    ((weights, naive),) = names["CASES"].values()
    case = Case(tied=True)
    sums, expected = case.measure(weights, chunk=4), case.naive(naive)
    assert expected > 1
    torch.testing.assert_close(sums["objective"], expected, rtol=0, atol=1e-9)
    for got, wanted in zip(case.gradients(sums["objective"]), case.gradients(expected), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-9)
    assert "overlap" in sums, "the training log shows what the loss needs"
    settled(replace(parse([]), loss=weights), checked=True)
    with pytest.raises(UserError, match="lk, log_acceptance must be above 0"):
        settled(replace(parse([]), loss=replace(weights, log_acceptance=0)), checked=True)


def test_every_loss_has_a_weight_and_a_row_of_its_page():
    page = (ROOT / "docs/explanation/losses.md").read_text()
    assert {field.name for field in fields(LossConfig)} - {"head_decay", "d_pace"} == set(loss_table.LOSSES)
    assert [name for name in loss_table.LOSSES if f"\n| `{name}`" not in page] == []


# ---- token weights


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_d_pace_weighs_a_step_by_its_share_in_the_expected_length(tied, chunk, monkeypatch):
    """Of q = 0.2, 0.6 and alpha = 0.5, P = 0.6, 0.48: weights 1.08 and 0.48. Against all logits at once.

    Logits are made once, those of the N - 1 columns after each chunk twice.
    """
    made, real = [], losses_module._logits
    monkeypatch.setattr(losses_module, "_logits", lambda xs, ws: made.append(len(xs[0])) or real(xs, ws))
    weights = d_pace(torch.tensor([0.2, 0.6, 0.9]), torch.tensor([True, True, False]), 0.5)
    torch.testing.assert_close(weights, torch.tensor([1.08, 0.48, 0.0]))
    case = Case(tied)
    sums = case.measure(LossConfig(cross_entropy=1, kl=0, d_pace=0.3), chunk)
    columns = int(
        (F.pad(case.labels[:, 0], (0, 1), value=IGNORE) != IGNORE)
        .logical_or(F.pad(case.labels[:, 1], (1, 0), value=IGNORE) != IGNORE)
        .sum()
    )
    chunks = -(-columns // (chunk or columns))
    assert sum(made) == N * (columns + (chunks - 1) * (N - 1))
    live = case.labels.movedim(1, 0) != IGNORE
    losses = torch.stack(
        [hard(case.outputs[i](x), None, case.labels[:, i].clamp_min(0)) for i, x in enumerate(case.features)]
    )
    reached = (0.7 * (-losses.detach()).exp() + 0.3).masked_fill(~live, 1).cumprod(0) * live
    expected = sum((reached[i:].sum(0) * losses[i] * live[i]).sum() for i in range(N))
    torch.testing.assert_close(sums["objective"], expected, rtol=1e-9, atol=0)
    for got, wanted in zip(case.gradients(sums["objective"]), case.gradients(expected), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-9)


def test_d_pace_counts_a_label_outside_the_draft_vocabulary_as_rejected():
    """Two steps of one draft, q = 0 and 1/4: P = 0.5, 0.5 * 0.625."""
    loss = ChunkedLoss(lambda hidden: hidden, LossConfig(cross_entropy=1, kl=0, d_pace=0.5), vocab_size=4)
    q, labels = torch.tensor([[0.25, 0.25]]), torch.tensor([[-1, 2]])
    weights = loss.pace(q, labels, torch.tensor([[0, 1]]), (1, 2))
    torch.testing.assert_close(weights, torch.tensor([[0.8125, 0.3125]]))


# ---- a draft vocabulary

DRAFT_TOKENS = [0, 2, 3, 7, 8, 10]


def whole(z):
    """Logits over the whole vocabulary."""
    spread = torch.full((*z.shape[:-1], V), -torch.inf, dtype=z.dtype)
    spread[..., DRAFT_TOKENS] = z
    return spread


def pruned_hard(z, teacher, label):
    known = torch.zeros(V)
    known[DRAFT_TOKENS] = 1
    return hard(whole(z), teacher, label).where(known[label] == 1, 0)


def pruned_divergence(z, teacher, label, t=1.0):
    log_p = (teacher / t).log_softmax(-1)[..., DRAFT_TOKENS]
    return t * t * (log_p.exp() * (log_p - (z / t).log_softmax(-1))).sum(-1)


def pruned_rejection(z, teacher, label):
    """Total variation over the whole vocabulary."""
    return rejection(whole(z), teacher, label)


def pruned_hybrid(z, teacher, label):
    kept = 1 - pruned_rejection(z, teacher, label)
    share = torch.exp(-3 * kept.detach())
    return share * pruned_divergence(z, teacher, label) + (1 - share) * (1 - kept)


def pruned_mix(*x):
    return 0.3 * pruned_hard(*x) + 0.5 * pruned_divergence(*x) + 2 * pruned_rejection(*x)


PRUNED = {
    "cross-entropy": pruned_hard,
    "kl": pruned_divergence,
    "kl at temperature 2": lambda *x: pruned_divergence(*x, t=2.0),
    "total variation": pruned_rejection,
    "lk": pruned_hybrid,
    "mix": pruned_mix,
}


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_with_a_draft_vocabulary_loss_and_gradients_equal_the_naive_ones(name, tied, chunk):
    case, (weights, _) = Case(tied, draft_tokens=DRAFT_TOKENS), CASES[name]
    sums, expected = case.measure(weights, chunk), case.naive(PRUNED[name])
    torch.testing.assert_close(sums["objective"], expected, rtol=0, atol=1e-9)
    for got, wanted in zip(case.gradients(sums["objective"] * 0.7), case.gradients(expected * 0.7), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-9)


def test_with_a_draft_vocabulary_the_overlap_is_the_true_acceptance():
    case = Case(draft_tokens=DRAFT_TOKENS)
    with torch.no_grad():
        sums = case.measure(LossConfig(kl=1), 4)
        expected = case.naive(lambda *x: 1 - pruned_rejection(*x))
    torch.testing.assert_close(sums["overlap"].sum(), expected)


def test_the_chunk_is_chosen_by_the_whole_vocabulary():
    case, seen = Case(masked=False, draft_tokens=DRAFT_TOKENS), []

    def lm_head(hidden):
        seen.append(len(hidden))
        return hidden @ case.lm_head.T

    weights = LossConfig(kl=1)
    loss = ChunkedLoss(lm_head, weights, _CHUNK["cpu"] // 4)
    measured(loss, case.labels, case.features, case.outputs, case.hidden, case.draft_tokens)
    assert max(seen) == 4


@pytest.mark.skipif(not can_compile(torch.device("cpu")), reason="no C++ compiler here")
def test_a_compiled_loss_has_the_same_values_and_gradients(capsys):
    case = Case(draft_tokens=[1, 2, 4, 7, 10])
    weights = LossConfig(cross_entropy=0.3, kl=0.5, total_variation=2, lk=1)
    eager, compiled = case.measure(weights, 4), case.measure(weights, 4, compiled=True)
    assert capsys.readouterr().err.count("compiled") == 2
    for figure in ("objective", "loss", "accuracy", "overlap"):
        torch.testing.assert_close(compiled[figure], eager[figure], rtol=0, atol=1e-9)
    for got, wanted in zip(*(case.gradients(sums["objective"]) for sums in (compiled, eager)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-9)


def test_a_label_outside_the_draft_vocabulary_counts_as_a_miss():
    labels = torch.tensor([[[3, 4, 3, IGNORE], [7, 7, 7, IGNORE]]])
    identity = nn.Linear(2, 2, bias=False)
    identity.weight.data = torch.eye(2)
    choose = lambda rows: F.one_hot(torch.tensor([rows]), 2).float()  # noqa: E731
    loss = ChunkedLoss(lambda h: h, LossConfig(cross_entropy=1, kl=0), V, chunk=2)
    features, drafted = [choose([0, 0, 0, 0]), choose([1, 1, 0, 1])], torch.tensor([3, 7])
    sums = measured(loss, labels, features, [identity, identity], torch.zeros(1, 7, D), drafted)
    assert sums["count"].tolist() == [3, 3]
    assert sums["accuracy"].tolist() == [2, 2]
    assert sums["prefix_accuracy"].tolist() == [2, 1]
    right, wrong = -F.log_softmax(torch.tensor([1.0, 0.0]), -1)
    torch.testing.assert_close(sums["loss"], torch.stack([2 * right, 2 * right + wrong]))


@pytest.mark.parametrize("chunk", [None, 4])
def test_a_low_rank_bias_is_a_second_term_of_the_logits(chunk):
    """A Markov head adds W2 W1[previous token] to the logits."""
    case, (weights, loss) = Case(masked=False), CASES["mix"]
    generator = torch.Generator().manual_seed(3)
    rows = B * S
    features, bias = (torch.randn(rows, size, generator=generator, dtype=torch.float64) for size in (I, 2))
    w1, w2 = (torch.randn(V, size, generator=generator, dtype=torch.float64) for size in (I, 2))
    hidden, labels = torch.randn(rows, D, dtype=torch.float64), torch.randint(V, (1, rows))
    tensors = [x.requires_grad_() for x in (features, bias, w1, w2)]
    chunked = ChunkedLoss(lambda h: h @ case.lm_head.T, weights, V, chunk)
    terms = [[(features, w1), (bias, w2)]]
    objective = chunked(terms, labels, hidden, chunked.step_weights(1)[:, None]).objective
    expected = loss((features @ w1.T + bias @ w2.T)[None], (hidden @ case.lm_head.T)[None], labels).sum()
    torch.testing.assert_close(objective, expected)
    gradients = [torch.autograd.grad(x, tensors) for x in (objective, expected)]
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted)


def test_the_error_of_a_forecast_takes_rows_as_the_sample():
    """Against the spread of the ratio over many draws of rows whose drafts are alike within a row."""
    draw = torch.Generator().manual_seed(0)
    chances, lengths = torch.rand(4000, 40, generator=draw), torch.randint(5, 50, (4000, 40), generator=draw)
    a, n = (chances * lengths).double(), lengths.double()
    errors = []
    for row_a, row_n in zip(a, n, strict=True):
        drafts = torch.ones(3)  # two rows of the batch have drafts
        sums = step_metrics(*torch.zeros(2, 1, 3), None, torch.ones(1), drafts, lambda x: torch.tensor([0.0, 2.0, 1.0]))
        assert sums["rows"][0].tolist() == [5, 5, 5, 3, 3, 2]
        squares = [(row_a**2).sum(), (row_a * row_n).sum(), (row_n**2).sum(), row_a.sum(), row_n.sum(), 40]
        errors.append(forecast_error(squares))
        if len(errors) == 400:
            break
    ratios = a.sum(1) / n.sum(1)
    assert sum(errors) / len(errors) == pytest.approx(ratios.std().item(), rel=0.05)
    assert forecast_error([1, 1, 1, 1, 1, 1]) is None


def test_a_frozen_matrix_gets_no_gradient_buffer(monkeypatch):
    case = Case(masked=False)
    case.outputs[0].weight.requires_grad_(False)
    made = []
    zeros = torch.zeros_like
    monkeypatch.setattr(torch, "zeros_like", lambda x: made.append(x.shape) or zeros(x))
    case.measure(LossConfig(kl=1))["objective"].backward()
    assert made.count(case.outputs[1].weight.shape) == 1
    assert case.outputs[0].weight.grad is None
    assert case.outputs[1].weight.grad is not None


def test_head_decay_scales_the_objective_and_not_the_reported_loss():
    case = Case()
    even = case.measure(LossConfig(cross_entropy=1, kl=0))
    decayed = case.measure(LossConfig(cross_entropy=1, kl=0, head_decay=0.5))
    torch.testing.assert_close(decayed["loss"], even["loss"])
    expected = even["loss"][0] + 0.5 * even["loss"][1]
    torch.testing.assert_close(decayed["objective"], expected)
    (even_gradient,) = torch.autograd.grad(even["objective"], case.features[1])
    (decayed_gradient,) = torch.autograd.grad(decayed["objective"], case.features[1])
    torch.testing.assert_close(decayed_gradient, even_gradient / 2)


def test_cross_entropy_alone_does_not_call_the_targets_lm_head():
    case = Case()

    def never(hidden):
        raise AssertionError("the lm_head was called")

    loss = ChunkedLoss(never, LossConfig(cross_entropy=1, kl=0), V)
    measured(loss, case.labels, case.features, case.outputs, case.hidden)


def test_a_perfect_student_has_no_divergence_and_full_overlap():
    case = Case()
    case.features = [case.hidden[:, i + 1 : i + 1 + S] for i in range(N)]
    case.outputs = [nn.Linear(D, V, bias=False, dtype=torch.float64)] * N
    case.outputs[0].weight.data = case.lm_head
    with torch.no_grad():
        sums = case.measure(LossConfig(kl=1), 4)
    assert sums["loss"].abs().max() < 1e-9
    torch.testing.assert_close(sums["overlap"], sums["count"].double())


def test_a_batch_without_labels_gives_zeros():
    case = Case()
    case.labels = torch.full_like(case.labels, IGNORE)
    sums = case.measure(LossConfig(kl=1))
    assert sums["objective"] == 0
    assert sums["count"].sum() == 0
    assert all((gradient == 0).all() for gradient in case.gradients(sums["objective"]))


def test_prefix_accuracy_needs_all_earlier_steps():
    labels = torch.tensor([[[1, 1, 1, 1, IGNORE], [2, 2, 2, 2, IGNORE]]])
    identity = nn.Linear(V, V, bias=False)
    identity.weight.data = torch.eye(V)
    choose = lambda tokens: F.one_hot(torch.tensor([tokens]), V).float()  # noqa: E731
    loss = ChunkedLoss(lambda h: h, LossConfig(cross_entropy=1, kl=0), V, chunk=2)
    features = [choose([1, 1, 0, 0, 0]), choose([2, 0, 2, 0, 0])]
    figures = summarise(measured(loss, labels, features, [identity, identity], torch.zeros(1, 7, D))["metrics"])
    assert figures["position1/accuracy"] == 0.5
    assert figures["position1/prefix_accuracy"] == 0.25
    assert figures["teacher_forced_acceptance_length"] == 1 + 0.5 + 0.25


@pytest.mark.parametrize("name", CASES)
def test_under_autocast_gradients_are_float32_and_close(name):
    """The tolerance is wide: rounding can flip the sign of p - q, where total variation has a kink."""

    weights, loss = CASES[name]
    case = Case(masked=False)
    exact = case.gradients(case.naive(loss))
    case.features = [x.detach().float().requires_grad_() for x in case.features]
    case.outputs = [output.float() for output in case.outputs]
    case.hidden, case.lm_head = case.hidden.float(), case.lm_head.float()
    with torch.autocast("cpu", torch.bfloat16):
        objective = case.measure(weights, 4)["objective"]
    for got, wanted in zip(case.gradients(objective), exact, strict=True):
        assert got.dtype == torch.float32
        assert torch.cosine_similarity(got.double().flatten(), wanted.flatten(), dim=0) > 0.95


_WORKER = """
import gc, sys, torch, torch.distributed as dist
from speculator.heads import MLPSpeculator, MLPSpeculatorConfig
from speculator.heads.training import TrainingBatch
from train.options.config import LossConfig
from train.losses import ChunkedLoss

case = torch.load(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
head = MLPSpeculator(MLPSpeculatorConfig(**case["config"])).double()
head.load_state_dict(case["state"])
hidden, ids, labels = (case[name][rank::2] for name in ("hidden", "ids", "labels"))
wrapped = torch.nn.parallel.DistributedDataParallel(head)
gradients = []
for weights in case["weights"]:
    head.zero_grad()
    loss = ChunkedLoss(lambda h: h @ case["lm_head"].T, LossConfig(**weights), len(case["lm_head"]), chunk=5)
    batch = TrainingBatch(ids, torch.zeros_like(ids), hidden, hidden, {"labels": labels})
    objective = wrapped(batch, loss)["objective"][0]
    (objective * dist.get_world_size()).backward()  # the wrapper takes the mean over processes
    gradients.append({name: p.grad.clone() for name, p in head.named_parameters()})
if rank == 0:
    torch.save(gradients, sys.argv[2])
dist.barrier()
del wrapped, objective
gc.collect()  # cycles hold the group, whose threads must end before the interpreter
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def on_two_processes(tmp_path_factory):
    """A head, a batch of four rows, and two processes' gradients of every loss in CASES."""
    folder = tmp_path_factory.mktemp("two")
    torch.manual_seed(0)
    config = {"vocab_size": V, "emb_dim": D, "inner_dim": I, "n_predict": N}
    head = MLPSpeculator(MLPSpeculatorConfig(**config)).double()
    ids = torch.randint(V, (4, L))
    labels = align(ids, torch.zeros_like(ids), torch.rand(4, L) < 0.9, N)
    hidden, lm_head = torch.randn(4, L, D, dtype=torch.float64), torch.randn(V, D, dtype=torch.float64)
    weights = [asdict(weights) for weights, _ in CASES.values()]
    case = {"config": config, "state": head.state_dict(), "hidden": hidden, "ids": ids, "labels": labels}
    torch.save({**case, "lm_head": lm_head, "weights": weights}, folder / "case.pt")
    (folder / "worker.py").write_text(_WORKER)
    finish(launch(2, *(str(folder / name) for name in ("worker.py", "case.pt", "gradients.pt"))))
    return head, hidden, ids, labels, lm_head, torch.load(folder / "gradients.pt")


@pytest.mark.parametrize("index", range(len(CASES)), ids=list(CASES))
def test_gradients_on_two_processes_are_those_of_all_logits_at_once(on_two_processes, index):
    head, hidden, ids, labels, lm_head, gradients = on_two_processes
    loss = list(CASES.values())[index][1]
    head.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for i, z in enumerate(head.logits(hidden[:, :S], F.pad(ids[:, 1:-1], (0, N - 1)))):
        each = loss(z, hidden[:, i + 1 : i + 1 + S] @ lm_head.T, labels[:, i].clamp_min(0))
        total = total + (each * (labels[:, i] != IGNORE)).sum()
    total.backward()
    for name, parameter in head.named_parameters():
        torch.testing.assert_close(gradients[index][name], parameter.grad, rtol=0, atol=1e-9)


def test_a_gpu_s_chunks_are_whole_tiles():
    assert chunk_tokens("cuda", 128_256) == 512
    assert chunk_tokens("cuda", 2**19) == 128
    assert chunk_tokens("cpu", 1000) == 33_554


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_the_loss_on_a_gpu_is_that_of_a_cpu(compiled):
    """In bfloat16 under autocast, with the output matrix's gradient added up in float32 over several chunks."""
    assert _adds_in_float32(torch.device("cuda", 0), torch.bfloat16)
    weights = LossConfig(cross_entropy=0.3, kl=0.5, total_variation=2)
    torch.manual_seed(0)
    given = [torch.randn(*shape) / 4 for shape in ((4096, 64), (700, 64), (700, 64), (700, 32), (4096, 32))]
    found = []
    for device in ("cpu", "cuda"):
        matrix, *features, hidden, head = (x.to(device) for x in given)
        labels = torch.arange(2 * 700, device=device).view(2, 700) % 4096
        matrix.requires_grad_()
        loss = ChunkedLoss(lambda h, head=head: h @ head.T, weights, 4096, 256, compiled=compiled and device == "cuda")
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            terms = [[(x, matrix)] for x in features]
            objective = loss(terms, labels, hidden, torch.ones(2, 1, device=device)).objective
        found.append((objective.detach().cpu(), torch.autograd.grad(objective, matrix)[0].cpu()))
    (expected, exact), (objective, gradient) = found
    torch.testing.assert_close(objective, expected, rtol=1e-2, atol=0)
    assert (gradient - exact).norm() < 2e-2 * exact.norm()
