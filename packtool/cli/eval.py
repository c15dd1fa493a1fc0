"""``packtool eval``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from packtool.cli.invocation import Invocation
from packtool.config.evaluate import EvalConfig
from packtool.launch.launcher import find_place
from packtool.visible import show, show_json

if TYPE_CHECKING:
    from packtool.launch.world import World


def run_eval(config: EvalConfig, invocation: Invocation) -> None:
    """Start under torchrun if the environment asks for it, else evaluate and print the totals.

    What does not fit is told here, once and at once, before any process is started.
    """
    world = find_place(
        invocation.arguments, config.sequence_parallel_ranks, partial(_prepare, config), max_wait=config.ddp_timeout
    )
    from packtool.report.evaluation import evaluation_json, print_evaluation
    from packtool.report.names import named
    from packtool.report.terminal import TerminalProgress
    from packtool.train.evaluate.run import evaluate_caches

    with TerminalProgress(enabled=world.is_first) as progress:
        result = evaluate_caches(config, progress, world)
    if not world.is_first:
        return
    if invocation.as_json:
        show_json(named(evaluation_json(result)))
        return
    print_evaluation(result)
    show(f"written: {result.output}")


def _prepare(config: EvalConfig, world: World) -> None:
    from packtool.train.prepare.evaluation import prepare_evaluation

    prepare_evaluation(config, world)
