import torch

from speculator.decoding.draft import take_at


def test_each_row_is_taken_at_its_own_place():
    values = torch.arange(2 * 3 * 2).view(2, 3, 2)
    assert take_at(values, torch.tensor([2, 0])).tolist() == [[4, 5], [6, 7]]
