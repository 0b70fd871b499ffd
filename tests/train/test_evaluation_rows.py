"""Validation rows that do not fill the batches of all processes."""

from pathlib import Path

import datasets
import pytest
import torch
from conftest import VOCAB, tiny_block_head, tiny_head, tiny_model

from speculator import Target
from speculator.checkpoints.loading import bind
from train.loop import Loop
from train.options.config import LossConfig, StageConfig
from train.stages import filled
from train.states.batch import Collator, StageRows, StateSource


@pytest.mark.parametrize("architecture", ["mlp", "eagle3", "dspark"])
def test_rows_that_fill_a_batch_do_not_count(tmp_path: Path, architecture: str):
    target = Target(tiny_model(), tokenizer=None)
    head = tiny_block_head(target) if architecture == "dspark" else bind(tiny_head(architecture=architecture), target)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (3, 20), generator=generator).tolist()
    rows = datasets.Dataset.from_list([{"input_ids": row, "loss_mask": [1] * 20} for row in tokens])

    def figures(batch: int, evaluated: datasets.Dataset) -> dict[str, float]:
        given = StageRows(rows, Collator(head.config), validation=evaluated, evaluation_batch=batch)
        loop = Loop(head, StateSource(target, head.aux_layers), StageConfig(), LossConfig(), given, tmp_path)
        return {name: value for name, value in loop.evaluate().items() if name != "eval_runtime"}

    alone = figures(1, rows)
    for batch, size in ((1, 4), (2, 4), (2, 8)):  # with 8, one batch has no row of the set
        assert len(filled(rows, size)) == size
        assert figures(batch, filled(rows, size)) == pytest.approx(alone, rel=1e-5)
    # Tokens without loss after the row add no label: every token of an answer is a label of all steps that reach it.
    longer = [{"input_ids": row + [0] * 3, "loss_mask": [1] * 20 + [0] * 3} for row in tokens]
    assert figures(1, datasets.Dataset.from_list(longer)) == pytest.approx(alone, rel=1e-5)
