"""Options of packing, steps, shared prefixes and sequence parallelism."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Literal

from packtool.config.conflicts import Settings
from packtool.config.settings import (
    YES_OR_NO,
    Tokens,
    num_tokens,
    packing_option,
    parallel_option,
    stream_option,
    training_option,
)

Balance = Literal["none", "within-step", "window"]
ScheduleName = Literal["packs", "skrull"]
PackingAlgorithm = Literal["best_fit", "binpacking", "sequential"]
SharePrefix = Annotated[Literal["auto", "true", "false"], YES_OR_NO]
SEQUENCE_PARALLELISM = "sequence parallelism (--sequence-parallel-size)"
"""Name of sequence parallelism in ``not_shared_with``."""


@dataclass(frozen=True, kw_only=True)
class PackOptions(Settings):
    """Composition of packs: the options of ``planning.packing.pack`` except the packing length."""

    shuffle: bool = packing_option(
        True, "Draw companions and order anew in every epoch; false keeps to the cache's order."
    )
    packing_algorithm: PackingAlgorithm = packing_option(
        "best_fit",
        "How samples are packed: best_fit fills best; binpacking is the library, in batches, as ms-swift uses it; "
        "sequential keeps the cache's order.",
    )
    packing_num_proc: int = packing_option(
        1,
        "Processes that pack windows (or binpacking's batches); the plan is the same for any number. One process packs "
        "40 million samples at once in seconds.",
    )
    packing_window: int | None = packing_option(
        None, "Pack windows of so many samples, drawn by the seed, apart from one another; by default all at once."
    )
    packing_batch_size: int = packing_option(
        1000, "Samples that --packing-algorithm binpacking packs at a time.", env="PACKING_BATCH_SIZE", minimum=1
    )
    look_ahead: int = packing_option(
        64,
        "Samples further on that --packing-algorithm sequential may fill a pack from; 0 never leaves the order.",
        minimum=0,
    )
    max_samples_per_pack: int | None = packing_option(None, "Most samples of a pack.")
    max_media_tokens_per_pack: Tokens | None = packing_option(
        None, "Most media tokens of a pack: bounds the memory of the vision tower.", minimum=1
    )


@dataclass(frozen=True, kw_only=True)
class IntervalOptions(Settings):
    """Number of samples that ``--streaming true`` holds at a time."""

    packing_interval: int = stream_option(1000, "Samples that streaming holds and packs at a time.")
    shuffle_buffer_size: int = stream_option(
        1000, "Samples that streaming draws the next one from; 1 keeps the order.", minimum=1
    )


@dataclass(frozen=True, kw_only=True)
class StepOptions(PackOptions):
    """Composition of packs and steps: the options of the planner."""

    packing_length: Tokens | None = packing_option(
        None, "Tokens that a pack holds at most; by default --max-length.", minimum=2
    )
    max_length: Tokens | None = packing_option(
        None, "Samples longer than this are left out and counted; by default the export's.", minimum=2
    )
    balance: Balance = packing_option(
        "within-step",
        "Assign packs to ranks so that they have equal work: not at all, within each step, or with exchanges between "
        "steps near each other.",
    )
    group_by_length: bool = packing_option(False, "Without packing: rows of about one length share a batch.")
    dynamic_batch_tokens: Tokens | None = packing_option(
        None,
        "Without packing: micro-batches of at most so many tokens, padding removed, instead of a number of rows.",
        aliases=("max_packing_token_size",),
    )
    dynamic_max_batch_size: int | None = packing_option(
        None, "Most rows of a micro-batch of --dynamic-batch-tokens.", minimum=1
    )
    per_device_train_batch_size: int = training_option(
        1, "Packs (or padded rows) of a micro-batch.", aliases=("micro_batch_size",)
    )
    gradient_accumulation_steps: int = training_option(1, "Micro-batches of an optimizer step on each rank.")
    samples_per_step: int | None = training_option(
        None,
        "A step has exactly the samples that it would have without packing, with batch size times accumulation times "
        "ranks equal to this: packed among themselves, so that steps, learning rates and losses stay what they were. "
        "By default a step has so many packs.",
    )


@dataclass(frozen=True, kw_only=True)
class SharingOptions(Settings):
    """Sharing of common prefixes of samples: an option of plan, train, eval and verify."""

    share_prefix: SharePrefix = packing_option(
        "auto",
        "Compute what samples begin with in common, such as a picture that several ask about, once: true, false, or "
        "auto for true where it saves more than 5 % of the tokens and nothing stands in the way.",
    )

    @property
    def not_shared_with(self) -> list[str]:
        """Given options that exclude shared prefixes, as on the command line."""
        raise NotImplementedError

    def value_problems(self) -> list[str]:
        """Return the problems of options that exclude ``--share-prefix true``."""
        if self.share_prefix != "true":
            return []
        why = {SEQUENCE_PARALLELISM: ", where a prefix would lie on several processes"}
        return [
            f"--share-prefix true cannot be combined with {name}{why.get(name, '')}: leave out one of them"
            for name in self.not_shared_with
        ]


SequenceParallelType = Literal["auto", "ulysses", "ring", "allgather"]

# Other kernels cannot merge results by their log-sum-exp.
WITH_BLOCKS = ("auto", "sdpa", "varlen", "reference")
"""Values of ``--attn-impl`` that sequence parallelism can use."""


@dataclass(frozen=True, kw_only=True)
class ParallelOptions(Settings):
    """Sequence parallelism: how a packed sequence is split over processes."""

    sequence_parallel_size: int | None = parallel_option(
        None,
        "Processes that share each packed sequence; the number of processes is a multiple of it. By default "
        "--ulysses-size times --ring-size.",
        aliases=("model_parallel_size",),
    )
    sequence_parallel_type: SequenceParallelType = parallel_option(
        "auto",
        "How they attend: ulysses exchanges heads for tokens, ring passes K and V around, allgather collects K and V; "
        "auto takes what moves least, and says why.",
    )
    ulysses_size: int | None = parallel_option(
        None, "Processes of the Ulysses axis of the mesh, next to each other; with --ring-size for both at once."
    )
    ring_size: int | None = parallel_option(None, "Processes of the ring axis of the mesh.")

    @property
    def sequence_parallel_ranks(self) -> int:
        """Processes that share each packed sequence, P."""
        return self.sequence_parallel_size or (self.ulysses_size or 1) * (self.ring_size or 1)

    def value_problems(self) -> list[str]:
        """Return the problems of sizes that contradict each other, and of kernels without sequence parallelism."""
        problems, size, kind = [], self.sequence_parallel_ranks, self.sequence_parallel_type
        axes = {"--ulysses-size": self.ulysses_size, "--ring-size": self.ring_size}
        sizes = {name: number for name, number in axes.items() if number is not None}
        shown = " and ".join(f"{name} {number}" for name, number in sizes.items())
        product = math.prod(sizes.values())
        if size % product or (len(sizes) == len(axes) and size != product):
            problems.append(f"--sequence-parallel-size {size} is not what {shown} come to: leave one of them out")
        elif kind == "ulysses" and size > (self.ulysses_size or size // (self.ring_size or 1)):
            problems.append(f"--sequence-parallel-type ulysses has no ring: leave out {shown}")
        elif kind in ("ring", "allgather") and size > 1 and self.ulysses_size == size:
            problems.append(f"--sequence-parallel-type {kind}: with {shown} there is no ring; leave one of them out")
        if size > 1 and (attn_impl := getattr(self, "attn_impl", "auto")) not in WITH_BLOCKS:
            problems.append(
                f"--attn-impl {attn_impl} cannot be combined with --sequence-parallel-size: use auto, which on CUDA is "
                "torch's own flash attention"
            )
        return problems


@dataclass(frozen=True, kw_only=True)
class PackingOptions(SharingOptions, StepOptions):
    """Packs and steps of plan and train."""

    schedule: ScheduleName = packing_option(
        "packs",
        "What is assigned to the ranks of a step: whole packs; or with skrull its samples one by one, by FLOPs, in "
        "micro-batches where each is local to one process or shared by all of a sequence-parallel group.",
    )
    bucket_size: str | None = packing_option(
        None,
        "Most tokens that a process holds in a micro-batch of --schedule skrull: a number, as in 8192 or 26K "
        "(K is 1024), or auto.",
    )
    max_rows_per_tree: int | None = packing_option(
        None,
        "Most samples that are packed together for what they share; more are cut into parts, which are in different "
        "steps where these can be had.",
        minimum=2,
    )
    use_dynamic_bsz: bool | None = packing_option(
        None,
        "MindSpeed-RL's switch: true needs --dynamic-batch-tokens and implies --packing false; false ignores both.",
    )
    seed: int = training_option(42, "Seed of packing, order and adapters.", minimum=0, maximum=2**32 - 1)

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Apply ``--use-dynamic-bsz``, MindSpeed-RL's switch, to settings."""
        if values.get("use_dynamic_bsz") is False:
            return {name: value for name, value in values.items() if not name.startswith("dynamic_")}
        return {"packing": False, **values} if values.get("use_dynamic_bsz") else values

    @property
    def has_no_rows(self) -> bool:
        """True if micro-batches are concatenated samples, whatever ``--packing`` says."""
        return self.dynamic_batch_tokens is not None or self.schedule == "skrull"

    def unshared_packing(self, packing: bool, num_ranks: int) -> list[str]:
        """Return the given options of packing that exclude shared prefixes; ``num_ranks`` processes share a pack."""
        is_given = {
            "--packing false": not packing and self.dynamic_batch_tokens is None,
            "--dynamic-batch-tokens": self.dynamic_batch_tokens is not None,
            "--schedule skrull": self.schedule == "skrull",
            "--max-samples-per-pack": self.max_samples_per_pack is not None,
            "--samples-per-step": self.samples_per_step is not None,
            SEQUENCE_PARALLELISM: num_ranks > 1,
        }
        return [name for name in is_given if is_given[name]]

    @property
    def has_equal_epochs(self) -> bool:
        """True if all epochs have the same number of micro-batches, which tokens do not determine."""
        return not self.has_no_rows and self.samples_per_step is None

    @property
    def bucket_tokens(self) -> int | None:
        """``--bucket-size`` as a number; None for auto or if it was not given; ValueError if it is neither."""
        return None if self.bucket_size in (None, "auto") else num_tokens(str(self.bucket_size))

    def value_problems(self) -> list[str]:
        """Return the problem of a ``--bucket-size`` that is no number."""
        try:
            _ = self.schedule == "skrull" and self.bucket_tokens
        except ValueError:
            return [f"--bucket-size {self.bucket_size}: give a number of tokens, as in 8192 or 26K, or auto"]
        return []


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(Settings):
    """The process group of several processes or machines, besides ``NNODES`` and the like."""

    ddp_timeout: int | None = parallel_option(
        None, "Seconds that processes and machines wait for each other; by default 1800.", minimum=1
    )

    @property
    def group_options(self) -> dict[str, timedelta]:
        """Keyword arguments of ``torch.distributed.init_process_group``."""
        return {} if self.ddp_timeout is None else {"timeout": timedelta(seconds=self.ddp_timeout)}
