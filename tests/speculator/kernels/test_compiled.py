import pytest
import torch

from speculator.kernels.compiled import Compiled, can_compile

needs_compiler = pytest.mark.skipif(not can_compile(torch.device("cpu")), reason="no C++ compiler here")


def double(x):
    return 2 * x


def test_each_kind_of_device_needs_its_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not can_compile(torch.device("cpu"))
    assert can_compile(torch.device("cuda")) == torch.cuda.is_available()
    assert not can_compile(torch.device("meta"))


@needs_compiler
def test_a_function_is_compiled_once_for_any_number_of_rows(capsys):
    compiled = Compiled(double, "doubling")
    torch.testing.assert_close(compiled(torch.ones(3, 8)), 2 * torch.ones(3, 8))
    assert capsys.readouterr().err.startswith("compiled doubling in ")
    with torch._dynamo.config.patch(error_on_recompile=True):
        torch.testing.assert_close(compiled(torch.ones(5, 8)), 2 * torch.ones(5, 8))
    assert not capsys.readouterr().err


def test_a_function_that_can_t_be_compiled_stays_as_it_is(monkeypatch, capsys):
    def broken(*given, **options):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", lambda *given, **options: broken)
    compiled = Compiled(double, "doubling")
    for _ in range(2):
        torch.testing.assert_close(compiled(torch.ones(3)), 2 * torch.ones(3))
    assert capsys.readouterr().err.count("warning") == 1
