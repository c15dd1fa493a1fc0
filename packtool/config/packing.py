"""What decides which samples share a pack, and which pack is trained when and where: options of plan and train.

How a packed sequence is spread over several processes: options of train, eval, verify, plan and simulate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Literal

from packtool.config.conflicts import Settings
from packtool.config.settings import YES_OR_NO, Tokens, num_tokens, option

Balance = Literal["none", "within-step", "window"]
ScheduleName = Literal["packs", "skrull"]
PackingAlgorithm = Literal["best_fit", "binpacking", "sequential"]
SharePrefix = Annotated[Literal["auto", "true", "false"], YES_OR_NO]
SEQUENCE_PARALLELISM = "sequence parallelism (--sequence-parallel-size)"
"""What ``not_shared_with`` calls it where several processes share a sequence."""


@dataclass(frozen=True, kw_only=True)
class PackOptions(Settings):
    """Which samples share a pack: what ``plan.packing.pack`` goes by, besides how much a pack holds."""

    shuffle: bool = option(
        True, "Draw companions and order anew in every epoch; false keeps to the cache's order.", panel="Packing"
    )
    packing_algorithm: PackingAlgorithm = option(
        "best_fit",
        "How samples are packed: best_fit fills best; binpacking is the library, in batches, as ms-swift uses it; "
        "sequential keeps the cache's order.",
        panel="Packing",
    )
    packing_num_proc: int = option(
        1,
        "Processes that pack windows (or binpacking's batches); the plan is the same for any number. One process packs "
        "40 million samples at once in seconds.",
        panel="Packing",
        minimum=1,
    )
    packing_window: int | None = option(
        None,
        "Pack windows of so many samples, drawn by the seed, apart from one another; by default all at once.",
        panel="Packing",
        minimum=1,
    )
    packing_batch_size: int = option(
        1000,
        "Samples that --packing-algorithm binpacking packs at a time.",
        panel="Packing",
        env="PACKING_BATCH_SIZE",
        minimum=1,
    )
    look_ahead: int = option(
        64,
        "Samples further on that --packing-algorithm sequential may fill a pack from; 0 never leaves the order.",
        panel="Packing",
        minimum=0,
    )
    max_samples_per_pack: int | None = option(None, "Most samples of a pack.", panel="Packing", minimum=1)
    max_media_tokens_per_pack: Tokens | None = option(
        None, "Most media tokens of a pack: bounds the memory of the vision tower.", panel="Packing", minimum=1
    )


@dataclass(frozen=True, kw_only=True)
class IntervalOptions(Settings):
    """How many samples ``--streaming true`` knows at a time."""

    packing_interval: int = option(
        1000, "Samples that streaming holds and packs at a time.", panel="Streaming", minimum=1
    )
    shuffle_buffer_size: int = option(
        1000, "Samples that streaming draws the next one from; 1 keeps the order.", panel="Streaming", minimum=1
    )


@dataclass(frozen=True, kw_only=True)
class StepOptions(PackOptions):
    """Which samples share a pack, and which packs are trained together: what the planner goes by."""

    packing_length: Tokens | None = option(
        None, "Tokens that a pack holds at most; by default --max-length.", panel="Packing", minimum=2
    )
    max_length: Tokens | None = option(
        None, "Samples longer than this are left out and counted; by default the export's.", panel="Packing", minimum=2
    )
    balance: Balance = option(
        "within-step",
        "Assign packs to ranks so that they have equal work: not at all, within each step, or with exchanges between "
        "steps near each other.",
        panel="Packing",
    )
    group_by_length: bool = option(False, "Without packing: rows of about one length share a batch.", panel="Packing")
    dynamic_batch_tokens: Tokens | None = option(
        None,
        "Without packing: micro-batches of at most so many tokens, padding removed, instead of a number of rows.",
        panel="Packing",
        minimum=1,
        aliases=("max_packing_token_size",),
    )
    dynamic_max_batch_size: int | None = option(
        None, "Most rows of a micro-batch of --dynamic-batch-tokens.", panel="Packing", minimum=1
    )
    per_device_train_batch_size: int = option(
        1,
        "Packs (or padded rows) of a micro-batch.",
        panel="Training",
        minimum=1,
        aliases=("micro_batch_size",),
    )
    gradient_accumulation_steps: int = option(
        1, "Micro-batches of an optimizer step on each rank.", panel="Training", minimum=1
    )
    samples_per_step: int | None = option(
        None,
        "A step has exactly the samples that it would have without packing, with batch size times accumulation times "
        "ranks equal to this: packed among themselves, so that steps, learning rates and losses stay what they were. "
        "By default a step has so many packs.",
        panel="Training",
        minimum=1,
    )


@dataclass(frozen=True, kw_only=True)
class SharingOptions(Settings):
    """Whether prefixes that samples have in common are computed once: of plan, train, eval and verify."""

    share_prefix: SharePrefix = option(
        "auto",
        "Compute what samples begin with in common, such as a picture that several ask about, once: true, false, or "
        "auto for true where it saves more than 5 % of the tokens and nothing stands in the way.",
        panel="Packing",
    )

    @property
    def not_shared_with(self) -> list[str]:
        """Options, as they are given, with which no prefixes are shared."""
        raise NotImplementedError

    def value_problems(self) -> list[str]:
        """Options that do not go with ``--share-prefix true``."""
        if self.share_prefix != "true":
            return []
        why = {SEQUENCE_PARALLELISM: ", where a prefix would lie on several processes"}
        return [
            f"--share-prefix true does not go with {name}{why.get(name, '')}: leave out one of them"
            for name in self.not_shared_with
        ]


SequenceParallelType = Literal["auto", "ulysses", "ring", "allgather"]

# The others do not take the lse of keys that they have not seen.
WITH_BLOCKS = ("auto", "sdpa", "varlen", "reference")
"""Values of ``--attn-impl`` for sequences that processes share: their results can be merged and differentiated."""


@dataclass(frozen=True, kw_only=True)
class ParallelOptions(Settings):
    """How a packed sequence is spread over several processes."""

    sequence_parallel_size: int | None = option(
        None,
        "Processes that share each packed sequence; the number of processes is a multiple of it. By default "
        "--ulysses-size times --ring-size.",
        panel="Sequence parallel",
        minimum=1,
        aliases=("model_parallel_size",),
    )
    sequence_parallel_type: SequenceParallelType = option(
        "auto",
        "How they attend: ulysses exchanges heads for tokens, ring passes K and V around, allgather collects K and V; "
        "auto takes what moves least, and says why.",
        panel="Sequence parallel",
    )
    ulysses_size: int | None = option(
        None,
        "Processes of the Ulysses axis of the mesh, next to each other; with --ring-size for both at once.",
        panel="Sequence parallel",
        minimum=1,
    )
    ring_size: int | None = option(
        None, "Processes of the ring axis of the mesh.", panel="Sequence parallel", minimum=1
    )

    @property
    def sequence_parallel_ranks(self) -> int:
        """Processes that share each packed sequence, P."""
        return self.sequence_parallel_size or (self.ulysses_size or 1) * (self.ring_size or 1)

    def value_problems(self) -> list[str]:
        """Sizes that are not each other's products, and kernels whose results cannot be merged."""
        problems, size, kind = [], self.sequence_parallel_ranks, self.sequence_parallel_type
        axes = {"--ulysses-size": self.ulysses_size, "--ring-size": self.ring_size}
        given = {name: number for name, number in axes.items() if number is not None}
        shown = " and ".join(f"{name} {number}" for name, number in given.items())
        product = math.prod(given.values())
        if size % product or (len(given) == len(axes) and size != product):
            problems.append(f"--sequence-parallel-size {size} is not what {shown} come to: leave one of them out")
        elif kind == "ulysses" and size > (self.ulysses_size or size // (self.ring_size or 1)):
            problems.append(f"--sequence-parallel-type ulysses has no ring: leave out {shown}")
        elif kind in ("ring", "allgather") and size > 1 and self.ulysses_size == size:
            problems.append(f"--sequence-parallel-type {kind}: with {shown} there is no ring; leave one of them out")
        if size > 1 and (attn_impl := getattr(self, "attn_impl", "auto")) not in WITH_BLOCKS:
            problems.append(
                f"--attn-impl {attn_impl} does not go with --sequence-parallel-size: use auto, which on CUDA is "
                "torch's own flash attention"
            )
        return problems


@dataclass(frozen=True, kw_only=True)
class PackingOptions(SharingOptions, StepOptions):
    """What decides the packs and steps of plan and train."""

    schedule: ScheduleName = option(
        "packs",
        "What is assigned to the ranks of a step: whole packs; or with skrull its samples one by one, by FLOPs, in "
        "micro-batches where each is local to one process or shared by all of a sequence-parallel group.",
        panel="Packing",
    )
    bucket_size: str | None = option(
        None,
        "Most tokens that a process holds in a micro-batch of --schedule skrull: a number, as in 8192 or 26K "
        "(K is 1024), or auto.",
        panel="Packing",
    )
    max_rows_per_tree: int | None = option(
        None,
        "Most samples that are packed together for what they share; more are cut into parts, which are in different "
        "steps where these can be had.",
        panel="Packing",
        minimum=2,
    )
    use_dynamic_bsz: bool | None = option(
        None,
        "MindSpeed-RL's switch: true needs --dynamic-batch-tokens and implies --packing false; false ignores both.",
        panel="Packing",
    )
    seed: int = option(42, "Seed of packing, order and adapters.", panel="Training", minimum=0, maximum=2**32 - 1)

    @classmethod
    def complete(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Given settings with those that ``--use-dynamic-bsz`` decides, as MindSpeed-RL has it."""
        if given.get("use_dynamic_bsz") is False:
            return {name: value for name, value in given.items() if not name.startswith("dynamic_")}
        return {"packing": False, **given} if given.get("use_dynamic_bsz") else given

    @property
    def has_no_rows(self) -> bool:
        """Whether micro-batches are made of samples end to end, whatever ``--packing`` says."""
        return self.dynamic_batch_tokens is not None or self.schedule == "skrull"

    def unshared_packing(self, packing: bool, num_ranks: int) -> list[str]:
        """Options of packing, as they are given, with which no prefixes are shared.

        Args:
            packing: the option of that name.
            num_ranks: processes that share each pack.
        """
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
    def has_as_many_micro_batches(self) -> bool:
        """Whether every epoch has as many micro-batches as the first: not where tokens decide how many a step has."""
        return not self.has_no_rows and self.samples_per_step is None

    @property
    def bucket_tokens(self) -> int | None:
        """``--bucket-size`` as a number; None if it is auto or was not given.

        Raises:
            ValueError: if it is none of these.
        """
        return None if self.bucket_size in (None, "auto") else num_tokens(str(self.bucket_size))

    def value_problems(self) -> list[str]:
        """A ``--bucket-size`` that is no number."""
        try:
            _ = self.schedule == "skrull" and self.bucket_tokens
        except ValueError:
            return [f"--bucket-size {self.bucket_size}: give a number of tokens, as in 8192 or 26K, or auto"]
        return []


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(Settings):
    """Options for how processes of several machines find each other, besides ``NNODES`` and its like."""

    ddp_timeout: int | None = option(
        None,
        "Seconds that processes and machines wait for each other; by default 1800.",
        panel="Sequence parallel",
        minimum=1,
    )

    @property
    def group_options(self) -> dict[str, timedelta]:
        """Keyword arguments of ``torch.distributed.init_process_group``."""
        return {} if self.ddp_timeout is None else {"timeout": timedelta(seconds=self.ddp_timeout)}
