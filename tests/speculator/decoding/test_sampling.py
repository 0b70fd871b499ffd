import pytest
import torch

from speculator.decoding import sampling
from speculator.decoding.sampling import RowSampling, Sampling, draw, most_likely, uniforms
from speculator.errors import UserError
from speculator.kernels.compiled import Compiled, can_compile


def test_uniforms_are_uniform_and_differ_by_seed_position_and_slot():
    seeds, positions = torch.arange(200).repeat_interleave(50), torch.arange(50).repeat(200)
    u = uniforms(seeds, positions, 20).flatten()
    assert u.unique().numel() == u.numel()
    assert u.min() >= 0
    assert u.max() < 1
    counts = torch.histc(u, 100, 0, 1)
    expected = u.numel() / 100
    assert ((counts - expected) ** 2 / expected).sum() < 160  # chi-square, 99 degrees: p = 1e-4


def test_a_uniform_is_a_function_of_its_counters_alone():
    alone = uniforms(torch.tensor([7]), torch.tensor([30]), 4)
    among = uniforms(torch.tensor([1, 7, 2]), torch.tensor([5, 30, 9]), 9)
    assert torch.equal(alone[0], among[1, :4])


def test_no_stream_starts_at_a_fixed_point():
    """The finaliser alone maps 0 to 0: seed 0 would always draw the first token."""
    first = uniforms(torch.arange(1000), torch.zeros(1000, dtype=torch.long), 1)[:, 0]
    assert first[0] > 1e-6
    counts = torch.histc(first, 20, 0, 1)
    assert ((counts - 50) ** 2 / 50).sum() < 52  # chi-square, 19 degrees: p = 1e-4


def test_neighbouring_streams_are_not_correlated():
    u = uniforms(torch.arange(20000), torch.zeros(20000, dtype=torch.long), 2)
    for a, b in ((u[:-1, 0], u[1:, 0]), (u[:, 0], u[:, 1])):
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 0.03


def test_draw_inverts_the_cumulative_distribution():
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]]).repeat(5, 1)
    tokens = draw(probs, torch.tensor([0.0, 0.2499, 0.25, 0.9, 1 - 1e-16], dtype=torch.float64))
    assert tokens.tolist() == [1, 1, 3, 3, 3]


def test_warpers_keep_the_documented_tokens():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert (Sampling(1.0, top_k=2).probs(logits) > 0).tolist() == [[True, True, False, False]]
    assert (Sampling(1.0, top_k=2**70).probs(logits) > 0).all()
    assert (Sampling(1.0, top_p=0.65).probs(logits) > 0).tolist() == [[True, True, False, False]]
    assert (Sampling(1.0, top_p=0.75).probs(logits) > 0).tolist() == [[True, True, True, False]]
    assert (Sampling(1.0, min_p=0.6).probs(logits) > 0).tolist() == [[True, True, False, False]]
    torch.testing.assert_close(Sampling(0.5).probs(logits), torch.tensor([[16, 9, 4, 1]]) / 30)


@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-31, 1e-30, 1.0, 1e30])
@pytest.mark.parametrize("others", [{}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}])
def test_every_temperature_gives_a_distribution(temperature, others):
    logits = torch.tensor([[300.0, -200.0, 299.0, -torch.inf], [1.0, 2.0, 3.0, -torch.inf]])
    probs = Sampling(temperature, **others).probs(logits)
    torch.testing.assert_close(probs.sum(-1), torch.ones(2))
    assert (probs[:, 3] == 0).all()
    if temperature < 1e-3:
        assert probs.argmax(-1).tolist() == [0, 2]
        assert probs.amax(-1).tolist() == [1, 1]
    assert Sampling(temperature).greedy == (temperature < 1e-30)


_NAN = float("nan")


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"temperature": 1e31},
        {"temperature": _NAN},
        {"temperature": True},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"top_k": 2.0},
        {"min_p": 1},
        {"seed": 2**63},
        {"seed": None},
    ],
)
def test_values_out_of_range_are_refused_by_name(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        Sampling(**bad)


@pytest.mark.parametrize("scale", [0.5, 2.0, 6.0])
def test_top_p_looks_at_the_likeliest_tokens_alone_where_they_are_enough(scale, monkeypatch):
    logits = scale * torch.randn(4, 3, 500, generator=torch.Generator().manual_seed(0))
    settings = RowSampling([Sampling(1.0, top_p=top_p) for top_p in (0.9, 1.0, 0.5, 0.99)], logits.device)
    whole = settings.probs(logits)
    monkeypatch.setattr(sampling, "_TOP_P_CANDIDATES", 100)
    assert torch.equal(settings.probs(logits), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_of_equal_scores_is_chosen(dtype):
    scores = torch.randint(0, 3, (64, 3, 50), generator=torch.Generator().manual_seed(0)).to(dtype)
    assert most_likely(scores).tolist() == [[row.index(max(row)) for row in rows] for rows in scores.tolist()]


@pytest.mark.soak
@pytest.mark.skipif(not can_compile(torch.device("cpu")), reason="no C++ compiler here")
@torch.inference_mode()
def test_compiled_noise_is_that_of_the_same_counters():
    """As on a GPU, where it is compiled; up to the rounding of two logarithms."""
    noise = Compiled(sampling.gumbel, "the noise")
    for rows, places, size in ((3, 4, 1000), (1, 1, 50), (8, 1, 3000)):
        given = torch.arange(rows)[:, None] * 7919, torch.arange(places) + 100 * torch.arange(rows)[:, None], size
        torch.testing.assert_close(noise(*given), sampling.gumbel(*given), atol=2e-6, rtol=0)


@torch.inference_mode()
def test_noise_of_any_number_of_rows_and_levels_is_one_graph(monkeypatch):
    """A compilation stalls a server's requests for seconds. Rows and levels in two dimensions made four graphs."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(sampling.gumbel, dynamic=True, backend=backend)
    monkeypatch.setattr(sampling, "_gumbel_on", lambda kind: compiled)
    for rows, places in ((1, 1), (3, 1), (1, 4), (3, 4)):
        seeds, levels = torch.arange(rows) * 7919, torch.arange(places) + 100 * torch.arange(rows)[:, None]
        expected = sampling.gumbel(seeds[:, None], levels, 50)
        torch.testing.assert_close(sampling._noise_of(seeds, levels, 50), expected, atol=2e-6, rtol=0)
    assert len(graphs) == 1
