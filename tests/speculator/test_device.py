import torch

from speculator import device


def test_a_macs_gpu_is_not_used_and_that_is_said_once(monkeypatch, capsys):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("mps"))
    device._log_mps.cache_clear()
    assert not device.has_accelerator()  # so a run trains on the CPU
    assert [device.resolve_device().type for _ in range(2)] == ["cpu"] * 2
    assert capsys.readouterr().err.count("Apple's GPU") == 1
