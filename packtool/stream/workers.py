"""Blocks of rows encoded in worker processes, given back in the order in which they were read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from packtool.config.data import EncodeSpec
from packtool.encode.blocks import encode_samples, samples_of
from packtool.encode.encoded import EncodedSample, left_out_of
from packtool.encode.encoder import Encoder
from packtool.encode.model_files import ModelFiles
from packtool.errors import PacktoolError, StoreDownError
from packtool.launch.worker import WorkerDied, WorkerPool, tokenize_in_one_thread
from packtool.rows.sample import Dropped
from packtool.stream.reading import Place, PlacedBlock


@dataclass(frozen=True, eq=False)
class EncodedBlock:
    """What became of a block's rows.

    Args:
        place: right before the block.
        samples: in the order of the rows.
        dropped: rows, and turns or responses of rows of which others are kept.
    """

    place: Place
    samples: list[EncodedSample]
    dropped: list[Dropped]


def encoded_blocks(
    blocks: Iterator[PlacedBlock], spec: EncodeSpec, *, num_proc: int, num_ahead: int
) -> Iterator[EncodedBlock]:
    """Encode blocks in worker processes, up to ``num_ahead`` of them ahead of the caller.

    Args:
        num_proc: worker processes; the result is the same for any number.

    Raises:
        PacktoolError: a worker died, or what a block's rows raised.
    """
    resumes = "--resume-from-checkpoint true goes on from the newest checkpoint, if there is one"
    with WorkerPool[PlacedBlock, EncodedBlock](num_proc, _encode_blocks, spec) as pool:
        try:
            yield from pool.map(blocks, num_ahead=num_ahead)
        except WorkerDied:
            raise PacktoolError(
                "a worker process that encodes rows died (killed, or out of memory?)",
                f"{resumes}; fewer --dataset-num-proc need less memory.",
            ) from None
        except StoreDownError as error:
            raise error.with_resume_advice(f"{resumes}.") from error


def _encode_blocks(report: object, spec: EncodeSpec) -> Callable[[PlacedBlock], EncodedBlock]:
    """Load the tokenizer, and return what encodes a block in a worker process."""
    tokenize_in_one_thread()
    return partial(_encode, Encoder(spec, ModelFiles.load(spec.model, spec.chat_template)))


def _encode(encoder: Encoder, block: PlacedBlock) -> EncodedBlock:
    encoded = EncodedBlock(block.place, [], [])
    group = list(samples_of(block.source, [block.block], may_hold_secrets=False))
    for item in encode_samples(group, encoder):
        if isinstance(item, Dropped):
            encoded.dropped.append(item)
        else:
            encoded.samples.extend(item)
            encoded.dropped.extend(left_out_of(item))
    return encoded
