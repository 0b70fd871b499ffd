"""What the trainer reports about the loss."""

import pytest
from conftest import tiny_block_head, tiny_model

from speculator import Target
from train.config import LossConfig
from train.trainer import Collator, SpeculatorTrainer, arguments


@pytest.mark.parametrize("d_pace", [1.0, 0.5], ids=["plain", "d_pace"])
def test_an_evaluation_of_the_training_rows_reports_the_loss_of_the_first_training_step(tmp_path, d_pace):
    """A DSpark head: its loss has a confidence part, and its later positions have fewer labels."""
    target = Target(tiny_model(), tokenizer=None)
    head = tiny_block_head(target, n_predict=3, anchors=8, aux_layers=[0], num_hidden_layers=1).float()
    rows = [{"input_ids": [(7 * i + j) % 32 for j in range(9 + i)], "loss_mask": [0] * i + [1] * 9} for i in range(4)]
    trainer = SpeculatorTrainer(
        model=head,
        target=target,
        loss=LossConfig(cross_entropy=0.1, kl=0.0, total_variation=1.8, head_decay=0.7, d_pace=d_pace),
        decode=lambda head: {"acceptance_length": 1.0, "acceptance_length_sampled": 1.0},
        args=arguments(
            output_dir=str(tmp_path),
            max_steps=1,
            learning_rate=0.0,
            logging_steps=1,
            eval_steps=5,
            save_steps=5,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=2,
            report_to="none",
        ),
        data_collator=Collator(head.config),
        train_dataset=rows,
        eval_dataset=rows,
    )
    trainer.train()
    trained = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trained, rel=1e-3)
