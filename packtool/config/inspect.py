"""Settings of ``packtool inspect``."""

from __future__ import annotations

from dataclasses import dataclass

from packtool.config.rows import AccessOptions, access_problems
from packtool.config.settings import REQUIRED, option
from packtool.constants import TRAIN_SPLIT


@dataclass(frozen=True, kw_only=True)
class InspectConfig(AccessOptions):
    """What ``packtool inspect`` needs to know."""

    directory: str = option(REQUIRED, "The cache, or the --output-dir of a run; may stand without the option's name.")
    row: int | None = option(
        None,
        "Show this sample of the split, as a person can read it. With --run, or of a run's only cache, when it was "
        "trained, and with which others.",
        minimum=0,
    )
    run: str | None = option(None, "The --output-dir of a run: when it trained the sample of --row.")
    trained: bool = option(False, "Of a run, or of one of its checkpoints: what was trained until then, by cache.")
    step: int | None = option(
        None, "Of a run: what this step held, rank by rank; the first step is 1, as in the log.", minimum=1
    )
    split: str = option(TRAIN_SPLIT, "Split that --row counts in, and that pages show.")
    model: str | None = option(None, "Directory of the tokenizer and config.json; by default the export's model.")
    plan: str | None = option(None, "A plan of the cache, with its steps, from packtool plan --save.")
    pack: int | None = option(None, "Show this pack of --plan; samples that share a prefix as a tree.", minimum=0)
    html: str | None = option(
        None,
        "Write pages into this new folder, to leaf through samples and their media, dropped rows, and the steps and "
        "packs of --plan; they need no server.",
    )
    max_samples: int = option(
        1000,
        "Most samples on the pages of --html, evenly chosen from the split; with --plan about so many, of whole steps.",
        minimum=1,
        maximum=1_000_000,
    )
    serve: bool = option(False, "Show the pages of the whole cache at an address of this machine, until Ctrl-C.")
    port: int = option(0, "Port of --serve; 0 takes one that is free.", minimum=0, maximum=65_535)
    verify: bool = option(False, "Read the whole cache, and say which files are damaged and how to mend them.")

    @property
    def named_places(self) -> tuple[str, ...]:
        """See ``AccessOptions``."""
        return (self.directory,)

    def problems(self) -> list[str]:
        """Mistakes that only show when settings are seen together."""
        found = access_problems(self)
        shown = {
            "--row": self.row is not None,
            "--trained": self.trained,
            "--step": self.step is not None,
            "--pack": self.pack is not None,
            "--html": self.html is not None,
            "--serve": self.serve,
            "--verify": self.verify,
        }
        if sum(shown.values()) > 1:
            names = [name for name, is_given in shown.items() if is_given]
            found.append(f"{' and '.join(names)} show different things: give one of them")
        if self.run is not None and self.row is None:
            found.append("--run goes with --row: when was this sample of the cache trained in that run")
        if self.run is not None and self.split != TRAIN_SPLIT:
            found.append(f"--run trains the {TRAIN_SPLIT} split: leave out --split {self.split}")
        if self.pack is not None and self.plan is None:
            found.append("--plan and --pack go together: pack k of a plan")
        if self.plan is not None and not (self.pack is not None or self.html is not None or self.serve):
            found.append("--plan and --pack go together (or --plan with --html, or --serve): pack k of a plan")
        return found
