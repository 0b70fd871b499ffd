"""The door of a run: everything that it decides before its target is loaded, decided once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig, PreTrainedConfig

from data.magpie import Asking
from data.mixture import Mixture, mixture_of
from data.writing import Writing
from speculator.errors import UserError, first_line
from speculator.heads import SpeculatorConfig
from speculator.target.gguf.file import read_config
from speculator.target.loading import load_config, text_config
from train import checks
from train.config import HERE, RunConfig, StageConfig
from train.gpus import Place, place_of
from train.initialise import head_config
from train.plan import Plan
from train.sizes import with_sizes_of_target, with_steps

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
    head: SpeculatorConfig
    asking: Asking
    self_writing: Writing
    own_writing: Writing

    @classmethod
    def of(cls, asked: RunConfig, target: PreTrainedConfig | None, place: Place) -> Run:
        """Return the run of some settings (`asked`) and its target's config (None: unknown).

        Raises a UserError for a wrong setting, or one that does not fit the target.
        """
        if target is not None:
            checks.check_is_decoder(asked.target.name_or_path, target)
        text = target and text_config(target)
        config = with_sizes_of_target(asked, text)
        own, generate = config.data.self_source, config.stage2.generate
        filters = {"top_k": generate.top_k, "top_p": generate.top_p, "min_p": generate.min_p}
        return cls(
            config=config,
            place=place,
            target=target,
            text=text,
            shortens=not asked.data.seq_length,
            mixture=mixture_of(config.data.sources),
            head=head_config(config.speculator, text if text and hasattr(text, "vocab_size") else _ANY_TARGET),
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

    @property
    def processes(self) -> int:
        """Number of the run's processes."""
        return self.place.processes

    @cached_property
    def plan(self) -> Plan | None:
        """Memory and time that the run needs; None if its target's family or its sharding can't be planned."""
        try:
            return Plan(self)
        except UserError:
            return None

    @property
    def folder(self) -> Path:
        """The run's folder."""
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

    Args:
        processes: number of the run's processes.
        local_only: read no more of the target than is on this machine, and look at no device.
        place: the processes and their devices, if they are known.

    Raises:
        UserError: the target's config can't be read, or a setting is out of range, contradicts another one, or does not
            fit the target.
    """
    named = config.target
    if local_only:
        target, place = known_config(config), Place(processes)
    else:
        target = load_config(named.name_or_path, named.trust_remote_code, named.revision)
        place = place or place_of(config.plan or HERE, processes)
    run = Run.of(config, target, place)
    checks.settings(run)
    checks.fits_config(run)
    return run


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
