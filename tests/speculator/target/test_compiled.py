from functools import partial

import pytest
import torch
from conftest import tiny_head, tiny_model

from speculator import HeadDrafter, Target, generate
from speculator.decoding.sampling import Sampling
from speculator.target import compiled as compiled_module
from speculator.target.compiled import Compiled, can_compile, compile_regions

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


def own_forwards(target) -> set[str]:
    return {type(module).__name__ for module in target.model.modules() if "forward" in vars(module)}


def texts(target) -> list:
    """Greedy and sampled, plain and drafted, with one row and with three."""
    drafter = HeadDrafter(tiny_head(), 3)
    settings = [Sampling(), Sampling(temperature=1.0)]
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    return [
        generate(target, each, rows, sampling, max_new_tokens=12).tokens
        for each in (None, drafter)
        for sampling in settings
        for rows in (prompts[:1], prompts)
    ]


REGIONS = {
    "llama": {"LlamaRMSNorm", "LlamaMLP", "LlamaAttention"},
    "gemma3": {"Gemma3RMSNorm", "Gemma3MLP", "Gemma3Attention"},
    "mixtral": {"MixtralRMSNorm", "MixtralAttention"},
    "gpt2": set(),
}


@pytest.mark.parametrize("family", REGIONS)
def test_texts_are_the_same_with_compiled_regions(family, monkeypatch):
    """Traced as on a GPU, but run without code generation, which takes long."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    target = Target(tiny_model(family), tokenizer=None)
    before = texts(target)
    compile_regions(target)
    assert own_forwards(target) == REGIONS[family]
    with torch._dynamo.config.patch(error_on_recompile=True):  # later shapes need no compilation
        assert texts(target) == before


@needs_compiler
@pytest.mark.soak
@pytest.mark.parametrize("family", REGIONS)
def test_texts_are_the_same_with_generated_code(family):
    target = Target(tiny_model(family), tokenizer=None)
    before = texts(target)
    compile_regions(target)
    assert own_forwards(target) == REGIONS[family]
    assert texts(target) == before


@pytest.mark.parametrize("kind", ["coarse", "broken"])
def test_regions_that_change_the_logits_or_fail_are_left_out(kind, monkeypatch, capsys, target):
    def compiler(function, **options):
        def coarse(*given, **named):
            out = function(*given, **named)
            return tuple(map(rounded, out)) if isinstance(out, tuple) else rounded(out)

        def rounded(x):
            return (x / 1e-2).round() * 1e-2

        def broken(*given, **named):
            raise RuntimeError("no compiler")

        return coarse if kind == "coarse" else broken

    hidden = target.hidden(torch.arange(8)[None])
    monkeypatch.setattr(torch, "compile", compiler)
    compile_regions(target)
    assert not own_forwards(target)
    assert capsys.readouterr().err.count("\n") == 1
    assert torch.equal(target.hidden(torch.arange(8)[None]), hidden)


def test_a_loaded_target_is_compiled_on_the_devices_where_that_pays(monkeypatch, target_folder):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    assert not own_forwards(Target.load(str(target_folder)))
    monkeypatch.setattr(compiled_module, "DEVICES", ("cpu",))
    assert own_forwards(Target.load(str(target_folder)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_regions_are_compiled_on_a_gpu(dtype):
    target = Target(tiny_model().to("cuda", dtype), tokenizer=None)
    compile_regions(target)
    assert own_forwards(target) == REGIONS["llama"]
    assert len(texts(target)) == 8
