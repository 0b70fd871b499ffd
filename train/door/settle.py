"""The door of a run: what its settings and its target's config decide, once they are checked.

`--plan`, `--dry_run`, `speculator server-command` and the run itself come in by `settle`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig, PreTrainedConfig

from data.magpie import Asking
from data.mixture import Mixture, mixture_of
from data.writing import Writing
from speculator.errors import UserError, first_line, refuse
from speculator.heads import SpeculatorConfig
from speculator.target.gguf.file import read_config
from speculator.target.loading import causal, load_config, text_config
from train.door import checks
from train.door.gpus import Place, place_of
from train.door.head import Start, head_config, start_folder
from train.door.sizes import Lengths, with_sizes_of_target, with_steps
from train.options.config import HERE, RunConfig, StageConfig

_ANY_TARGET = LlamaConfig(num_hidden_layers=2**16, vocab_size=2**31)
"""Larger than any target, so that a head for it refuses only what no target allows."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run decides before its target is loaded.

    Attributes:
        config: the settings, with the row length and the draft vocabulary that the target allows.
        place: the processes and their devices.
        target, text: the target's config, and the part about the text that it writes; None if it is unknown, to a dry
            run or a finished one.
        shortens: the settings name no row length, so little text may have shorter rows.
        mixture: the sources.
        lengths: the longest texts.
        start: the trained head that a warm start begins with, or None.
        head: config of the head; one for `_ANY_TARGET` if the target is unknown.
        asking, self_writing: how the target writes the source `self`: user turns, and answers.
        own_writing: how the target writes the text of stage 2.
    """

    config: RunConfig
    place: Place
    target: PreTrainedConfig | None
    text: PreTrainedConfig | None
    shortens: bool
    mixture: Mixture
    lengths: Lengths
    start: Start | None
    head: SpeculatorConfig
    asking: Asking
    self_writing: Writing
    own_writing: Writing

    @classmethod
    def of(cls, asked: RunConfig, target: PreTrainedConfig | None, place: Place, start: Start | None = None) -> Run:
        """Return the run of some settings and its target's config (None: unknown); `start`: a warm start already read.

        Raises a UserError for a wrong setting, settings that contradict each other, and whatever does not fit the
        target, as far as its config tells.
        """
        name, options = asked.target.name_or_path, asked.speculator
        text = target and text_config(causal(target, name))
        refuse(
            (text is not None and not hasattr(text, "vocab_size"), f"can't load the target {name!r}: no language model")
        )
        if options.warm_start and start is None:  # with its weights: damaged ones are found before hours of preparation
            start = Start.of(options.warm_start, start_folder(options))
        config = with_sizes_of_target(asked, text, None if start is None else start.config)
        if start is not None:
            start.check_architecture(options)
        own, generate, mixture = config.data.self_source, config.stage2.generate, mixture_of(config.data.sources)
        lengths = Lengths.of(config, mixture)
        filters = {"top_k": generate.top_k, "top_p": generate.top_p, "min_p": generate.min_p}
        run = cls(
            config=config,
            place=place,
            target=target,
            text=text,
            shortens=not asked.data.seq_length,
            mixture=mixture,
            lengths=lengths,
            start=start,
            head=head_config(config.speculator, text or _ANY_TARGET),
            asking=Asking(rows=own.max_rows, turns=own.turns, max_prompt_tokens=own.max_prompt_tokens),
            self_writing=Writing(
                samplings=checks.samplings("data.self_source", own.temperatures),
                max_new_tokens=own.max_new_tokens,
                seed=config.data.seed,
            ),
            own_writing=Writing(
                samplings=checks.samplings("stage2.generate", generate.temperatures, **filters),
                max_new_tokens=generate.max_new_tokens,
                seed=config.data.seed,
            ),
        )
        checks.settings(config, mixture, run.head, lengths, place.processes)
        if start is not None:
            start.check(config, run.head, text)
        if text is not None:
            checks.fits_target(config, run.head, lengths, text, place.processes)
        return run

    def changed(self, config: RunConfig) -> Run:
        """Return the run of other settings with the same target and start."""
        return self.of(config, self.target, self.place, self.start)

    @property
    def processes(self) -> int:
        return self.place.processes

    @property
    def folder(self) -> Path:
        return Path(self.config.output_dir)

    @property
    def head_folder(self) -> Path:
        """The folder of the best head."""
        return self.folder / "speculator"

    @property
    def continues(self) -> bool:
        """True if stage 2 has prompts from the data; False if the target writes them, or if there is no stage 2."""
        return bool(self.config.stage2.max_steps) and not self.mixture.is_self

    def stage(self, name: str, rows: int) -> StageConfig:
        """Return the settings of "stage1" or "stage2"; the number of training rows decides steps and learning rate."""
        return with_steps(getattr(self.config, name), rows, self.processes, self.head.emb_dim)


def settle(config: RunConfig, processes: int, local_only: bool = False, place: Place | None = None) -> Run:
    """Read the target's config, check the settings, and return the run that they describe.

    With `local_only`, read no more of the target than is on this machine, and look at no device. Raises a UserError if
    the target's config can't be read, or a setting is out of range, contradicts another one or doesn't fit the target.
    """
    named = config.target
    if local_only:
        target, place = known_config(config), Place(processes)
    else:
        target = load_config(named.name_or_path, named.trust_remote_code, named.revision)
        place = place or place_of(config.plan or HERE, processes)
    return Run.of(config, target, place)


def known_config(config: RunConfig) -> PreTrainedConfig | None:
    """Return the target's config if it is on this machine, else None; a UserError is raised for an invalid one."""
    target = config.target
    try:
        return read_config(
            target.name_or_path, target.trust_remote_code, revision=target.revision, local_files_only=True
        )
    except (OSError, ValueError):
        return None
    except StrictDataclassError as error:
        raise UserError(f"the config of {target.name_or_path}: {first_line(error)}") from None
