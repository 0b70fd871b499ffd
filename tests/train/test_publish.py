"""The head that a run leaves."""

from conftest import tiny_head

from train.stages import publish


def test_the_weights_of_a_head_are_as_readable_as_its_config(tmp_path):
    publish(tiny_head(), tmp_path / "head")
    modes = {(tmp_path / "head" / name).stat().st_mode for name in ("config.json", "model.safetensors")}
    assert len(modes) == 1
