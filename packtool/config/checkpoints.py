"""When checkpoints are written, which are kept, and from which one a run goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from packtool.config.conflicts import Settings
from packtool.config.settings import NOT_AT_ALL, YES_OR_NO, Panel, option

SaveStrategy = Annotated[Literal["steps", "epoch", "best", "no"], NOT_AT_ALL]
_PANEL: Panel = "Checkpoints and logs"


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(Settings):
    """When checkpoints are written, which are kept, and from which one a run goes on."""

    save_strategy: SaveStrategy = option(
        "steps",
        "When to save: every --save-steps, at the end of every epoch, where an evaluation is the best so far, or not "
        "at all. The end is saved too, but with no and best.",
        panel=_PANEL,
    )
    save_steps: int = option(500, "Optimizer steps between two checkpoints.", panel=_PANEL, minimum=1)
    save_total_limit: int | None = option(None, "Checkpoints to keep.", panel=_PANEL, minimum=1)
    save_only_model: bool = option(False, "Save weights only; such checkpoints cannot be gone on from.", panel=_PANEL)
    load_best_model_at_end: bool = option(
        False,
        "End with the checkpoint whose evaluation was best: it is saved and kept, whatever else is, and told at the "
        "end.",
        panel="Evaluation",
    )
    metric_for_best_model: str = option(
        "loss", "What best means: loss, perplexity, token_accuracy, or loss/CHANNEL.", panel="Evaluation"
    )
    greater_is_better: bool | None = option(
        None, "Whether more of --metric-for-best-model is better; by default of accuracies only.", panel="Evaluation"
    )
    early_stop_interval: int | None = option(
        None,
        "End after so many evaluations in a row in which --metric-for-best-model was not better than its best.",
        panel="Evaluation",
        minimum=1,
    )
    resume_from_checkpoint: Annotated[str, YES_OR_NO] | None = option(
        None, "true for the newest checkpoint in --output-dir, or the directory of one.", panel=_PANEL
    )
    data_change: Literal["refuse", "allow"] = option(
        "refuse",
        "What a resumed run does whose caches are others than its checkpoint's: refuse to go on, naming them; or plan "
        "what is left of the epoch anew, so that nothing is trained in it twice and nothing is lost.",
        panel=_PANEL,
    )

    @property
    def seeks_best(self) -> bool:
        """Whether evaluations decide which checkpoint is saved or told."""
        return self.load_best_model_at_end or self.save_strategy == "best"

    @property
    def best_metric(self) -> str:
        """The figure of an evaluation that decides, as log lines name it: ``eval_loss``."""
        return "eval_" + self.metric_for_best_model.removeprefix("eval_")

    @property
    def prefers_greater(self) -> bool:
        """Whether more of it is better."""
        return "accuracy" in self.best_metric if self.greater_is_better is None else self.greater_is_better
