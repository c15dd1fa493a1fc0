"""Options of checkpoints: when they are saved, which are kept, and from which one a run resumes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from packtool.config.conflicts import Settings
from packtool.config.settings import NOT_AT_ALL, YES_OR_NO, checkpoint_option, evaluation_option

SaveStrategy = Annotated[Literal["steps", "epoch", "best", "no"], NOT_AT_ALL]


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(Settings):
    """Saving, keeping and resuming of checkpoints."""

    save_strategy: SaveStrategy = checkpoint_option(
        "steps",
        "When to save: every --save-steps, at the end of every epoch, where an evaluation is the best so far, or not "
        "at all. The end is saved too, but with no and best.",
    )
    save_steps: int = checkpoint_option(500, "Optimizer steps between two checkpoints.", minimum=1)
    save_total_limit: int | None = checkpoint_option(None, "Checkpoints to keep.", minimum=1)
    save_only_model: bool = checkpoint_option(False, "Save weights only; such checkpoints cannot be gone on from.")
    load_best_model_at_end: bool = evaluation_option(
        False,
        "End with the checkpoint whose evaluation was best: it is saved and kept, whatever else is, and told at the "
        "end.",
    )
    metric_for_best_model: str = evaluation_option(
        "loss", "What best means: loss, perplexity, token_accuracy, or loss/CHANNEL."
    )
    greater_is_better: bool | None = evaluation_option(
        None, "Whether more of --metric-for-best-model is better; by default of accuracies only."
    )
    early_stop_interval: int | None = evaluation_option(
        None,
        "End after so many evaluations in a row in which --metric-for-best-model was not better than its best.",
        minimum=1,
    )
    resume_from_checkpoint: Annotated[str, YES_OR_NO] | None = checkpoint_option(
        None, "true for the newest checkpoint in --output-dir, or the directory of one."
    )
    data_change: Literal["refuse", "allow"] = checkpoint_option(
        "refuse",
        "What a resumed run does whose caches are others than its checkpoint's: refuse to go on, naming them; or plan "
        "what is left of the epoch anew, so that nothing is trained in it twice and nothing is lost.",
    )

    @property
    def seeks_best(self) -> bool:
        """True if evaluations determine which checkpoint is saved or reported."""
        return self.load_best_model_at_end or self.save_strategy == "best"

    @property
    def best_metric(self) -> str:
        """The evaluation metric that selects the best checkpoint, as in log lines: ``eval_loss``."""
        return "eval_" + self.metric_for_best_model.removeprefix("eval_")

    @property
    def prefers_greater(self) -> bool:
        """True if a larger value of ``best_metric`` is better."""
        return "accuracy" in self.best_metric if self.greater_is_better is None else self.greater_is_better
