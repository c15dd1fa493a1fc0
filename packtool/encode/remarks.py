"""What a user should know of how a model is encoded for, beyond what was asked."""

from __future__ import annotations

from packtool.config.export import EncodeSpec
from packtool.encode.families import MediaEncoding
from packtool.encode.loss_scale import is_hybrid_thinking, loss_scale_of
from packtool.encode.model_files import ModelFiles
from packtool.encode.row_parts import expansion_of


def remarks_on(spec: EncodeSpec, files: ModelFiles, media: MediaEncoding) -> tuple[str, ...]:
    """A line each.

    Raises:
        ConfigError: if the loss scale cannot be understood.
    """
    found = [*media.remarks]
    asked, meant = spec.loss_scale, loss_scale_of(spec.loss_scale, is_hybrid_thinking(files))
    if meant != asked:
        found.append(
            f"--loss-scale {asked} means {meant} here: the chat template is one for hybrid thinking, whose prompt "
            f"writes the empty thinking block itself, so it carries no loss; {asked}+keep_empty_think trains it"
        )
    if files.end_mark:
        found.append(
            f"the chat template ends no answer, and generation stops at {files.end_mark.strip()}, which opens the next "
            "turn: it stands behind the last answer, too, and is trained as the end of each"
        )
    if spec.expand_turns == "auto":
        drops = expansion_of("auto", files) == "auto"
        found.append(
            "--expand-turns auto: the chat template leaves out what earlier turns thought, so a row in which it does "
            "becomes several samples"
            if drops
            else "--expand-turns auto changes nothing: the chat template keeps what earlier turns thought"
        )
    return tuple(found)
