import pytest
import torch

from speculator import Session, generate
from speculator.decoding.cache import RowCache
from speculator.decoding.session import common_prefix


@pytest.mark.parametrize(
    ("a", "b", "count"),
    [([], [], 0), ([1], [], 0), ([1, 2, 3], [1, 2, 3], 3), ([1, 2], [1, 2, 3], 2), ([1, 9, 3], [1, 2, 3], 1)],
)
def test_what_two_texts_share_ends_where_they_first_differ(a, b, count):
    assert common_prefix(a, b) == common_prefix(b, a) == count


def test_a_prefill_that_is_interrupted_is_not_trusted(target, monkeypatch):
    """It has overwritten slots of the text before."""
    session = Session(target)
    (first,) = generate(target, None, [[1, 2, 3, 4]], max_new_tokens=12, session=session).tokens
    text = [1, 2, 3, 4, *first]
    extend = target.extend

    def interrupted(*given):
        extend(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(target, "extend", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate(target, None, [[1, 2, 9, 9, 9, 9, 9, 9, 9]], session=session)
    expected = generate(target, None, [text], max_new_tokens=12).tokens
    assert generate(target, None, [text], max_new_tokens=12, session=session).tokens == expected


def test_every_token_sees_something_in_a_window():
    """A finished row may be longer than what is read; attention over nothing need not give a number."""
    cache = RowCache(layers=1, rows=2, capacity=64, device=torch.device("cpu"))
    cache.lengths.copy_(torch.tensor([40, 3]))
    cache.reach(3)
    with cache.writing(2):
        mask = cache.mask(groups=1, window=4)
    assert mask.any(-1).all()
    assert mask[1, 0].tolist() == [[True, True, True, True, False], [False, True, True, True, True]]
