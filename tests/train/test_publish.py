"""The head that a run leaves."""

from conftest import tiny_head

from train.stages import publish


def test_whoever_reads_the_config_of_a_head_reads_its_weights(tmp_path):
    publish(tiny_head(), tmp_path / "head")
    modes = {(tmp_path / "head" / name).stat().st_mode for name in ("config.json", "model.safetensors")}
    assert len(modes) == 1
