"""What decides the content of a cache, told from the options of its export and the model's files."""

from __future__ import annotations

from dataclasses import replace

from packtool.cache.manifest import Identity
from packtool.config.export import ExportConfig
from packtool.encode.families import MediaLimits
from packtool.encode.loss_scale import is_hybrid_thinking, loss_scale_of
from packtool.encode.model_files import ModelFiles, place_of
from packtool.encode.row_parts import expansion_of


def identity_of(config: ExportConfig, files: ModelFiles, limits: MediaLimits) -> Identity:
    """What decides the content of the cache that an export makes.

    Args:
        limits: on media, of the model with the user's options.
    """
    return Identity(
        # What is looked up later must be found from any directory; the fingerprint leaves the model's place out.
        spec=replace(config.encode_spec, expand_turns=expansion_of(config.expand_turns, files)).recorded()
        | {
            "model": place_of(config.model),
            # As it is meant, so that a cache whose empty thinking blocks are targets is not taken for one without.
            "loss_scale": loss_scale_of(config.loss_scale, is_hybrid_thinking(files)),
        },
        model_type=files.model_type,
        tokenizer_hash=files.tokenizer_hash,
        template_hash=files.template_hash,
        processor_hash=files.processor_hash,
        media_limits=limits,
        seed=config.seed,
        split_dataset_ratio=config.split_dataset_ratio,
        rows_per_shard=config.rows_per_shard,
    )
