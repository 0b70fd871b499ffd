import pytest

from speculator import Session, generate
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
