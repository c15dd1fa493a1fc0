"""``packtool eval``."""

from __future__ import annotations

import os

from packtool.cli import train
from packtool.config.evaluate import EvalConfig
from packtool.launch.processes import Processes, is_launched, launch_if_asked, share_cores_politely
from packtool.visible import show, show_json


def run_eval(config: EvalConfig, as_json: bool) -> None:
    """Start under torchrun if the environment asks for it, else evaluate and print the totals.

    What does not fit is told here, once and at once, before any process is started.
    """
    share_cores_politely()
    from packtool.launch.world import World

    world = World.from_environment()
    if not is_launched(os.environ):
        world = World(0, Processes.from_environment(os.environ).total).shared_by(config.num_sharing)
        if world.size > 1:
            from packtool.train.prepare.evaluation import prepare_evaluation

            prepare_evaluation(config, world)
            launch_if_asked(train.invocation)
    from packtool.report.evaluation import evaluation_json, print_evaluation
    from packtool.report.names import named
    from packtool.report.terminal import TerminalProgress
    from packtool.train.evaluate.run import evaluate_caches

    with TerminalProgress(enabled=world.is_first) as progress:
        result = evaluate_caches(config, progress, world)
    if not world.is_first:
        return
    if as_json:
        show_json(named(evaluation_json(result)))
        return
    print_evaluation(result)
    show(f"written: {result.output}")
