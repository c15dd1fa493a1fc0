"""``packtool plan --model``: the memory of a rank that would train the plan."""

from __future__ import annotations

from packtool.batch.spec import model_config
from packtool.config.plan import PlanConfig
from packtool.config.settings import part_of
from packtool.config.train import TrainConfig
from packtool.encode.model_files import ModelFiles
from packtool.errors import UnsupportedModelError
from packtool.launch.world import World
from packtool.plan.epoch import EpochPlan
from packtool.train.model.load import resolve_dtype
from packtool.train.model.memory import MemoryEstimate, estimate_memory, model_without_weights
from packtool.train.model.quiet import quiet_transformers
from packtool.train.prepare.heaviest import heaviest_tokens, seen_media, share_media, with_longest
from packtool.train.prepare.preview import Preview
from packtool.train.prepare.rank_tokens import RankTokens
from packtool.train.prepare.recompute import with_recomputing
from packtool.train.prepare.sequence_parallel import axes_of, with_shares


def planned_memory(config: PlanConfig, found: Preview) -> MemoryEstimate:
    """What ``packtool train --dry-run`` would tell of a rank on a GPU; takes seconds.

    Args:
        config: with a model.
        found: its plan.

    Raises:
        ConfigError, UnsupportedModelError: if training would refuse the model, or transformers does not know it.
    """
    if found.staged is None:
        return _memory_of(config, found, found.plan, found.options.packing_length, config.sequence_parallel_ranks)
    kinds = {
        (part.planner.options.packing_length, part.sequence_parallel_size): next(part.stretches()).plan
        for part in found.staged.parts
    }
    told = [_memory_of(config, found, plan, room, size) for (room, size), plan in kinds.items()]
    return max(told, key=lambda estimate: estimate.total or 0)


def _memory_of(config: PlanConfig, found: Preview, plan: EpochPlan, room: int, size: int) -> MemoryEstimate:
    """What a rank holds that trains packs of ``room`` tokens, each on ``size`` processes."""
    assert config.model is not None, "asked for"
    output = "output"
    run = with_recomputing(part_of(TrainConfig, config, model=config.model, output_dir=output, packing_length=room))
    run, files = with_shares(run, size), ModelFiles.load(config.model)
    try:
        model = model_config(files.directory)
    except ValueError as error:
        raise UnsupportedModelError(str(error).splitlines()[0], "Name a model that transformers has.") from error
    dtype = resolve_dtype(model, run, on_gpu=True)
    axes = axes_of(run, World(0, config.world_size, size), files, found.lengths, trained=True)
    micro_batches = with_longest(run, files.config, RankTokens(computed=1))
    if found.reader is not None:
        index = found.reader.index
        tokens = index if found.shared is None else found.shared
        shares = share_media(seen_media(index, files.config), files.config, plan, size) if size > 1 else None
        micro_batches = heaviest_tokens(run, plan, files.config, tokens.media_tokens, tokens.audio_tokens, shares)
    with quiet_transformers():
        empty = model_without_weights(run, model, dtype)
    return estimate_memory(
        run, empty, model, dtype=dtype, world_size=config.world_size, micro_batches=micro_batches, axes=axes
    )
