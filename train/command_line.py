"""The config of a command line: defaults, then YAML files, then flags. Mistakes show at once: torch is not imported."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import yaml

from speculator.errors import OneLineParser, UserError
from train.options.config import HERE, ROOT, HeadOptions, LossConfig, RunConfig, TargetConfig
from train.options.loader import Values, add_flags, build, convert, no_setting, options, read_file, read_word

CONFIGS = ROOT / "configs"
_EMBEDDED = TargetConfig().name_or_path


def build_parser() -> OneLineParser:
    """Return the parser of train.py: a flag `--section.field` per field of `RunConfig`, with its docstring as help."""
    parser = OneLineParser(
        prog="train.py",
        usage="%(prog)s [--config FILE] [--section.key VALUE] ...",
        description="Train a draft head. Without --config: configs/eagle3.yaml for the target that you name, "
        "configs/continue.yaml if you name a head to start from too, configs/quickstart.yaml if you name neither.",
    )
    parser.add_argument("--config", action="append", metavar="FILE", help="a YAML file with any of the fields below")
    add_flags(parser, RunConfig, alone={"plan": HERE})
    return parser


def _layers(argv: list[str]) -> list[Values]:
    """Return the settings of each file, or of the default recipe, and those of the flags, by dotted name."""
    parser = build_parser()
    mappings = {name: option.kinds for name, option in options(RunConfig).items() if option.default == {}}
    for flag in sorted({word.partition("=")[0] for word in argv if word.startswith("--")}):
        if flag[2:].rpartition(".")[0] in mappings:
            parser.add_argument(flag, dest=flag[2:])
    parsed, rest = parser.parse_known_args(argv)
    if rest and rest[0].startswith("--"):
        name, equals, value = rest[0].partition("=")
        raise no_setting(RunConfig, name[2:], f" {value if equals else ' '.join(rest[1:2]) or 'VALUE'}", "--")
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    flags = vars(parsed)
    files = flags.pop("config", None) or [str(default_recipe(flags))]
    layers = [read_file(RunConfig, _found(file)) for file in files]
    for name, kinds in mappings.items():
        single = [each for each in flags if each.startswith(f"{name}.")]
        keys = {each.rpartition(".")[2]: read_word(flags.pop(each)) for each in single}
        if keys := convert(name, flags.pop(name, "{}"), kinds) | keys:
            flags[name] = keys
    return [*layers, flags]


def _found(file: str) -> str:
    """Return the path of a config file; configs/NAME.yaml, if it does not exist here, is the project's own."""
    ours = ROOT / file
    return str(ours) if not os.path.exists(file) and ours.parent == CONFIGS and ours.is_file() else file


def default_recipe(given: Values) -> Path:
    """Return the recipe of a command line without --config, by the settings that its flags give."""
    if "speculator.warm_start" in given:
        return CONFIGS / "continue.yaml"
    embedded = given.get("target.name_or_path", _EMBEDDED) == _EMBEDDED
    return CONFIGS / ("quickstart.yaml" if embedded else "eagle3.yaml")


def _merged(layers: list[Values]) -> Values:
    """Return the settings of all layers; a stage has the last length that one gives, `max_steps` or `epochs`.

    A layer's mapping is added to those before it. A stage that an earlier file leaves out by `max_steps: 0` runs if
    `epochs` are given later. A UserError is raised if flags give both.
    """
    given: Values = {}
    for layer in layers:
        for stage in ("stage1", "stage2"):
            steps, epochs = f"{stage}.max_steps", f"{stage}.epochs"
            passes = read_word(str(layer.get(epochs) or "null"))  # null is no length
            if steps in layer and passes is None:
                given.pop(epochs, None)
            elif steps not in layer and passes is not None and given.get(steps) == 0:
                del given[steps]
            elif layer is layers[-1] and steps in layer:
                raise UserError(f"--{steps} and --{epochs} are mutually exclusive")
        for name, value in layer.items():
            kinds, default, _ = options(RunConfig)[name]
            adds = default == {} and name in given
            given[name] = convert(name, given[name], kinds) | convert(name, value, kinds) if adds else value
    return given


def parse(argv: list[str]) -> RunConfig:
    """Return the config of a command line; a warm start has its head's shape, and by default our recipe's loss.

    Exits with code 2 and one line on stderr for an unknown key or an unusable value; with 0 after --help.
    """
    try:
        return _config(_layers(argv))
    except (UserError, OSError) as error:
        build_parser().fail(str(error))


def _config(layers: list[Values]) -> RunConfig:
    given = _merged(layers)
    config = build(RunConfig, given)
    if config.target.name_or_path == _EMBEDDED and not os.path.exists(_EMBEDDED):  # in another folder
        config = replace(config, target=replace(config.target, name_or_path=str(ROOT / _EMBEDDED)))
    if not config.speculator.warm_start:
        return config
    from train.door.head import with_settings_of_start  # imports torch

    names = [name.removeprefix("speculator.") for name in given if name.startswith("speculator.")]
    config = with_settings_of_start(config, names)
    has_loss = any(name.startswith("loss.") for name in given)
    return config if has_loss else replace(config, loss=LossConfig(**_loss_of(config.speculator)))


def _loss_of(head: HeadOptions) -> dict[str, float]:
    """Return the `loss` section of our recipe for a head's architecture and method; {} without such a recipe."""
    from train.door.head import head_class

    def method(options: HeadOptions) -> tuple[str, str]:
        return options.architecture, head_class(options).config_class.method(options.options)

    for file in sorted(CONFIGS.glob("*.yaml")):
        recipe = yaml.safe_load(file.read_text(encoding="utf-8"))
        if "speculator" in recipe and method(HeadOptions(**recipe["speculator"])) == method(head):
            return recipe.get("loss", {})
    return {}
