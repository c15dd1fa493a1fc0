"""What a run is made of, whichever kind it is."""

from __future__ import annotations

from packtool.config.train import TrainConfig
from packtool.launch.world import World
from packtool.train.prepare.cached import prepare_cached
from packtool.train.prepare.prepared import PreparedRun
from packtool.train.prepare.streamed import prepare_stream


def prepare_run(config: TrainConfig, world: World) -> PreparedRun:
    """A run on caches, or with ``--streaming true`` on rows as they come: checked and, as far as can be, planned.

    Raises:
        ConfigError, DataError, MismatchError, StorageError: naming what does not fit, and what to do.
    """
    return prepare_stream(config, world) if config.streaming else prepare_cached(config, world)
