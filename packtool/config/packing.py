"""Options of packing, steps, shared prefixes and sequence parallelism."""

from __future__ import annotations

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
"""Sequence parallelism in the texts of ``sharing_conflicts``."""


@dataclass(frozen=True, kw_only=True)
class PackOptions(Settings):
    """Composition of packs: the options of ``planning.packing.pack`` except the packing length."""

    shuffle: bool = packing_option(True, "Shuffle in every epoch; false keeps the cache's order.")
    packing_algorithm: PackingAlgorithm = packing_option(
        "best_fit", "Pack by best fit (least padding), ms-swift's binpacking, or in the cache's order."
    )
    packing_num_proc: int = packing_option(1, "Pack in N processes; the result does not depend on N.")
    packing_window: int | None = packing_option(
        None, "Pack random groups of N samples separately; default packs all samples together."
    )
    packing_batch_size: int = packing_option(
        1000, "Pack each N samples separately with --packing-algorithm binpacking.", env="PACKING_BATCH_SIZE", minimum=1
    )
    look_ahead: int = packing_option(
        64, "Choose from the next N samples with --packing-algorithm sequential; 0 keeps their order.", minimum=0
    )
    max_samples_per_pack: int | None = packing_option(None, "Limit each packed sequence to N samples.")
    max_media_tokens_per_pack: Tokens | None = packing_option(
        None, "Limit media tokens per packed sequence, to limit the vision tower's memory.", minimum=1
    )


@dataclass(frozen=True, kw_only=True)
class IntervalOptions(Settings):
    """Number of samples that ``--streaming true`` holds at a time."""

    packing_interval: int = stream_option(1000, "Pack N samples at a time when streaming.")
    shuffle_buffer_size: int = stream_option(
        1000, "Shuffle in a buffer of N samples when streaming; 1 keeps the order.", minimum=1
    )


@dataclass(frozen=True, kw_only=True)
class StepOptions(PackOptions):
    """Composition of packs and steps: the options of the planner."""

    packing_length: Tokens | None = packing_option(
        None, "Limit each packed sequence to N tokens; default is --max-length.", minimum=2
    )
    max_length: Tokens | None = packing_option(
        None, "Drop samples above N tokens; default is the export's --max-length.", minimum=2
    )
    balance: Balance = packing_option(
        "within-step", "Balance work across GPUs: not at all, within steps, or also across nearby steps."
    )
    group_by_length: bool = packing_option(False, "Batch samples of similar length; needs --packing false.")
    dynamic_batch_tokens: Tokens | None = packing_option(
        None,
        "Batch samples up to N tokens without padding; needs --packing false.",
        aliases=("max_packing_token_size",),
    )
    dynamic_max_batch_size: int | None = packing_option(
        None, "Limit micro-batches of --dynamic-batch-tokens to N samples.", minimum=1
    )
    per_device_train_batch_size: int = training_option(
        1, "Train N packed sequences (or padded samples) per micro-batch and GPU.", aliases=("micro_batch_size",)
    )
    gradient_accumulation_steps: int = training_option(1, "Accumulate gradients over N micro-batches in each step.")
    samples_per_step: int | None = training_option(None, "Train exactly N samples per step, like an unpacked run.")


@dataclass(frozen=True, kw_only=True)
class SharingOptions(Settings):
    """Sharing of common prefixes between samples, in plan, train, eval and verify."""

    share_prefix: SharePrefix = packing_option("auto", "Compute the common beginning of several samples only once.")

    @property
    def sharing_conflicts(self) -> list[str]:
        """Given options that exclude shared prefixes, as on the command line."""
        raise NotImplementedError

    def value_problems(self) -> list[str]:
        if self.share_prefix != "true":
            return []
        message = "--share-prefix true cannot be combined with {name}: leave out one of them"
        return [message.format(name=name) for name in self.sharing_conflicts]


SequenceParallelType = Literal["auto", "ulysses", "ring", "allgather"]

# Other kernels cannot merge partial results by their log-sum-exp.
SEQUENCE_PARALLEL_KERNELS = ("auto", "sdpa", "varlen", "reference")
"""Values of ``--attn-impl`` that sequence parallelism can use."""


@dataclass(frozen=True, kw_only=True)
class ParallelOptions(Settings):
    """Sequence parallelism: how a packed sequence is split over ranks."""

    sequence_parallel_size: int | None = parallel_option(
        None, "Split each packed sequence over N GPUs.", aliases=("model_parallel_size",)
    )
    sequence_parallel_type: SequenceParallelType = parallel_option(
        "auto", "Exchange attention heads (ulysses) or keys and values (ring, allgather) between GPUs."
    )
    ulysses_size: int | None = parallel_option(
        None, "Exchange attention heads among N GPUs (Ulysses), inside a ring of --ring-size."
    )
    ring_size: int | None = parallel_option(None, "Pass keys and values around a ring of N GPUs (ring attention).")

    @property
    def sequence_parallel_ranks(self) -> int:
        """Number of ranks that share each packed sequence, P."""
        return self.sequence_parallel_size or (self.ulysses_size or 1) * (self.ring_size or 1)

    def value_problems(self) -> list[str]:
        num_ranks = self.sequence_parallel_ranks
        problems = self._exchange_problems()
        attn_impl = getattr(self, "attn_impl", "auto")
        if num_ranks > 1 and attn_impl not in SEQUENCE_PARALLEL_KERNELS:
            problem = f"--attn-impl {attn_impl} cannot be combined with --sequence-parallel-size"
            problems.append(f"{problem}: use auto, which on CUDA is torch's own flash attention")
        return problems

    def _exchange_problems(self) -> list[str]:
        """Return a message if Ulysses ranks times ring ranks are not all ranks, or do not match the exchange."""
        num_ranks, exchange = self.sequence_parallel_ranks, self.sequence_parallel_type
        ulysses, ring = self.ulysses_size, self.ring_size
        given_sizes = {"--ulysses-size": ulysses, "--ring-size": ring}
        sizes_text = " and ".join(f"{name} {size}" for name, size in given_sizes.items() if size is not None)
        # With one of the sizes, the other follows from the number of ranks.
        num_divided = ulysses * ring if ulysses and ring else num_ranks - num_ranks % (ulysses or ring or 1)
        if num_divided != num_ranks:
            return [f"--sequence-parallel-size {num_ranks} does not match {sizes_text}: leave one of them out"]
        ring_ranks = ring or (num_ranks // ulysses if ulysses else 1)
        if exchange == "ulysses" and ring_ranks > 1:
            return [f"--sequence-parallel-type ulysses has no ring: leave out {sizes_text}"]
        if exchange in ("ring", "allgather") and num_ranks > 1 and ulysses == num_ranks:
            problem = f"with {sizes_text} there is no ring; leave one of them out"
            return [f"--sequence-parallel-type {exchange}: {problem}"]
        return []


@dataclass(frozen=True, kw_only=True)
class PackingOptions(SharingOptions, StepOptions):
    """Packs and steps of plan and train."""

    packs_per_step: int | None = training_option(
        None, "Train N packed sequences per step on any number of GPUs.", minimum=1
    )
    schedule: ScheduleName = packing_option(
        "packs", "With sequence parallelism, split all samples over GPUs (packs), or only long ones (skrull)."
    )
    bucket_size: str | None = packing_option(
        None, "Limit tokens per GPU with --schedule skrull; auto uses the GPU's memory."
    )
    max_rows_per_tree: int | None = packing_option(
        None, "Let at most N samples share a prefix; larger groups use several steps.", minimum=2
    )
    use_dynamic_bsz: bool | None = packing_option(
        None, "Enable --dynamic-batch-tokens as in MindSpeed-RL; true implies --packing false."
    )
    seed: int = training_option(42, "Set the random seed of packing, order and adapters.", minimum=0, maximum=2**32 - 1)

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the given values with MindSpeed-RL's switch ``use_dynamic_bsz`` applied to the options it controls."""
        if values.get("use_dynamic_bsz") is False:
            return {name: value for name, value in values.items() if not name.startswith("dynamic_")}
        return {"packing": False, **values} if values.get("use_dynamic_bsz") else values

    @property
    def has_unpadded_batches(self) -> bool:
        """True if micro-batches are concatenated samples without packs: dynamic batches, or Skrull's."""
        return self.dynamic_batch_tokens is not None or self.schedule == "skrull"

    def packing_sharing_conflicts(self, packing: bool) -> list[str]:
        """Return the given packing options that exclude shared prefixes."""
        is_given = {
            "--packing false": not packing and self.dynamic_batch_tokens is None,
            "--dynamic-batch-tokens": self.dynamic_batch_tokens is not None,
            "--schedule skrull": self.schedule == "skrull",
            "--max-samples-per-pack": self.max_samples_per_pack is not None,
        }
        return [name for name in is_given if is_given[name]]

    @property
    def bucket_tokens(self) -> int | None:
        """``--bucket-size`` as a number; None for auto or if it was not given; ValueError if it is neither."""
        return None if self.bucket_size in (None, "auto") else num_tokens(str(self.bucket_size))

    def value_problems(self) -> list[str]:
        try:
            _ = self.schedule == "skrull" and self.bucket_tokens
        except ValueError:
            return [f"--bucket-size {self.bucket_size}: give a number of tokens, as in 8192 or 26K, or auto"]
        return []


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(Settings):
    """Options of the process group; the environment (``NNODES``, ...) sets its processes and machines."""

    ddp_timeout: int | None = parallel_option(
        None, "Wait at most N seconds for other processes; default is 1800.", minimum=1
    )

    @property
    def group_options(self) -> dict[str, timedelta]:
        """Keyword arguments of ``torch.distributed.init_process_group``."""
        return {} if self.ddp_timeout is None else {"timeout": timedelta(seconds=self.ddp_timeout)}
