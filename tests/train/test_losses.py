import torch
from torch.nn import functional as F

from train.config import LossConfig
from train.losses import IGNORE, Measure, align, summarise

N, L, V = 2, 8, 11


def test_align_shows_the_shift_of_the_docstring():
    x = torch.arange(L)[None]
    labels = align(x, torch.zeros_like(x), N)
    assert labels.tolist() == [[[2, 3, 4, 5, 6], [3, 4, 5, 6, 7]]]


def test_no_label_crosses_a_document():
    x = torch.arange(L)[None]
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
    ignored = IGNORE
    assert align(x, documents, N).tolist() == [[[2, 3, ignored, ignored, 6], [3, ignored, ignored, ignored, 7]]]


def batch():
    torch.manual_seed(0)
    x = torch.randint(V, (3, L))
    labels = align(x, torch.zeros_like(x), N)
    return labels, torch.randn(3, L, V), torch.randn(N, 3, L - N - 1, V)


def test_cross_entropy_is_torchs():
    labels, _, logits = batch()
    measure = Measure(labels, None, LossConfig(cross_entropy=1.0, kl=0.0))
    for i in range(N):
        expected = F.cross_entropy(logits[i].flatten(0, 1), labels[:, i].flatten(), reduction="sum")
        torch.testing.assert_close(measure(i, logits[i])["loss"], expected)


def test_kl_is_torchs_against_the_law_of_the_labels_own_position():
    """Head i at t is taught by the state that chose its label: position t+1+i."""
    labels, teacher, logits = batch()
    measure = Measure(labels, teacher, LossConfig(cross_entropy=0.0, kl=1.0))
    for i in range(N):
        law = torch.stack([teacher[:, t + 1 + i].softmax(-1) for t in range(L - N - 1)], dim=1)
        expected = F.kl_div(logits[i].log_softmax(-1), law, reduction="sum")
        torch.testing.assert_close(measure(i, logits[i])["loss"], expected)


def test_a_perfect_student_has_no_divergence_and_full_overlap():
    labels, teacher, _ = batch()
    measure = Measure(labels, teacher, LossConfig(cross_entropy=0.0, kl=1.0))
    with torch.no_grad():
        sums = measure(0, teacher[:, 1 : L - N])
    assert abs(sums["loss"]) < 1e-4
    torch.testing.assert_close(sums["overlap"], sums["count"].float())


def test_masked_positions_count_nowhere():
    labels, teacher, logits = batch()
    masked = labels.clone()
    masked[:, :, 2:] = IGNORE
    whole = Measure(masked, teacher, LossConfig(1.0, 1.0))(0, logits[0])
    part = Measure(labels[:, :, :2], teacher, LossConfig(1.0, 1.0))(0, logits[0][:, :2])
    for name, value in part.items():
        torch.testing.assert_close(whole[name], value)


def test_prefix_accuracy_needs_every_head_before():
    labels = torch.tensor([[[1, 1, 1, 1], [2, 2, 2, 2]]])
    choose = lambda tokens: F.one_hot(torch.tensor([tokens]), V).float()  # noqa: E731
    measure = Measure(labels, None, LossConfig(1.0, 0.0))
    sums = [measure(0, choose([1, 1, 0, 0])), measure(1, choose([2, 0, 2, 0]))]
    figures = summarise({name: torch.stack([s[name] for s in sums]) for name in sums[0]})
    assert figures["head1/accuracy"] == 0.5
    assert figures["head1/prefix_accuracy"] == 0.25
    assert figures["simulated_tokens_per_step"] == 1 + 0.5 + 0.25
