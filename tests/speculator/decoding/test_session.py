import pytest

from speculator.decoding.session import common_prefix


@pytest.mark.parametrize(
    ("a", "b", "count"),
    [([], [], 0), ([1], [], 0), ([1, 2, 3], [1, 2, 3], 3), ([1, 2], [1, 2, 3], 2), ([1, 9, 3], [1, 2, 3], 1)],
)
def test_what_two_texts_share_ends_where_they_first_differ(a, b, count):
    assert common_prefix(a, b) == common_prefix(b, a) == count
