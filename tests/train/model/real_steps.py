"""Predicted and measured memory of real training steps, with small models of every family that can be trained.

A step has two micro-batches and an update of AdamW; it is the second one, so gradients and optimizer states are there.
The CPU's allocations are recorded by torch's profiler, which knows nothing of the trace. Attention keeps the tensors of
flash attention, as the estimate assumes; the kernels of a CPU keep copies and masks of their own.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, PreTrainedConfig

from packtool.attention.parallel import mesh
from packtool.attention.parallel.axes import Axes
from packtool.attention.parallel.mesh import SequenceParallel
from packtool.batch.batch import B, Batch, ShardedBatch, TreeBatch
from packtool.batch.collate import collate_packs, collate_tree
from packtool.batch.collate_shard import collate_shard
from packtool.batch.spec import InputSpec, auto_class
from packtool.config.data import EncodeSpec
from packtool.config.train import TrainConfig
from packtool.encode.encoded import EncodedSample
from packtool.encode.encoder import Encoder
from packtool.encode.families import FAMILIES, MediaLimits
from packtool.encode.model_files import ModelFiles
from packtool.rows.sample import MediaRef, Sample, Turn
from packtool.train.model.load import model_without_weights
from packtool.train.model.loss import LossFunction
from packtool.train.model.memory import estimate_memory
from packtool.train.model.trace import set_traced_attention, traced_batch
from packtool.train.model.trainable import make_trainable
from packtool.train.prepare.figures import RankTokens
from tests.batch.reduced import continued_sample, make_picture, make_sample, reduced_limits, save_image_processor
from tests.encode.other_families import model_of
from tests.forked import run_ranks
from tests.small_texts import TEXT_TYPES, small_text_config
from tests.train.real_models import ON_TEXT, THAT_HEAR, THAT_SEE, config_of
from tests.waiting import wait_for

SETTINGS: dict[str, dict[str, Any]] = {
    "packs": {},
    "adapters": {"train_type": "lora", "lora_dropout": 0.0},
    "checkpointing": {"gradient_checkpointing": True},
    "frozen towers": {"freeze_vit": True, "freeze_aligner": True},
    "trees": {},
}
SHARED = "two ranks"
"""Name of the setting in which two ranks share a sequence (Ulysses)."""

PROCESSED = [
    *(
        name
        for family in FAMILIES
        if family.processor_inputs or family.videos_as_pictures
        for name in family.model_types
    ),
    "pixtral",
]
"""Families whose rows are encoded by their own processor, and GLM's."""

TEXTS = [name for name in TEXT_TYPES if name not in ON_TEXT]
EVERY_FAMILY = [*ON_TEXT, *TEXTS, *THAT_SEE, *PROCESSED, *THAT_HEAR]
_SIZES = ((100, 60), (70, 150), (30, 20), (224, 112), (160, 120), (300, 200), (56, 112), (90, 60))
"""Width and height of pictures."""
_AXES = Axes(1, 2)


@dataclass(frozen=True)
class SmallModel:
    """A small model of a family; the directory has its processor, if it has one."""

    name: str
    config: PreTrainedConfig
    directory: str = ""

    @property
    def spec(self) -> InputSpec:
        if self.name in PROCESSED:
            files = ModelFiles.load(self.directory)
            return InputSpec.load(self.directory, Encoder(EncodeSpec(model=self.directory), files).limits)
        return InputSpec(self.directory, self.config, MediaLimits(reduced_limits(self.config)))

    def run_config(self, setting: str) -> TrainConfig:
        """The options of a run that trains it."""
        options: dict[str, Any] = {
            "train_type": "full",
            "freeze_vit": False,
            "freeze_aligner": False,
            "gradient_checkpointing": False,
        }
        options |= {"verify_packing": False, "packing_length": 256} | SETTINGS.get(setting, {})
        return TrainConfig(model=self.directory, cached_dataset=("",), output_dir="", **options)

    @property
    def settings(self) -> list[str]:
        """The settings that its batches are made for; packtool may refuse some of them."""
        if self.spec.has_audio:
            return ["packs", "adapters", "checkpointing", "frozen towers"]
        # peft takes PhiMoE's router, which returns several tensors, for a linear module, and its forward pass fails.
        return [each for each in (*SETTINGS, SHARED) if self.name != "phimoe" or each != "adapters"]


def small_model(name: str, drawn_data: Path, folder: Path) -> SmallModel:
    """The model of one of ``EVERY_FAMILY``; its files are made in ``folder``."""
    if name in PROCESSED:
        directory, _ = model_of(name, drawn_data, folder)
        return SmallModel(name, AutoConfig.from_pretrained(directory), str(directory))
    if name in TEXTS:
        return SmallModel(name, small_text_config(name))
    target = folder / f"small-{name}"
    target.mkdir(exist_ok=True)
    config = config_of(name, drawn_data, target)
    if name in THAT_SEE:
        save_image_processor(name if name.startswith("qwen2") else "qwen3_vl", str(target))
    return SmallModel(name, config, str(target))


def samples_of(model: SmallModel, *, share_prefix: bool) -> list[EncodedSample]:
    """Samples of texts and pictures of several sizes, whose last half are targets; not for models that hear."""
    spec = model.spec
    if model.name in PROCESSED:
        pictures = [(300, 200)] * 6 if share_prefix else _SIZES
        question = "What is it? " + "A long question. " * (40 if share_prefix else 0)
        rows = [_row(number, size, question, 0 if share_prefix else number) for number, size in enumerate(pictures)]
        encoder = Encoder(EncodeSpec(model=model.directory, max_length=10_000), ModelFiles.load(model.directory))
        return [sample for samples in encoder.encode(rows) for sample in samples]
    limits = spec.limits.image
    first, second = (((64, 64), (64, 64), (48, 40)), ((40, 32), (64, 64))) if limits else ((), ())
    if share_prefix:
        trunk = make_sample(150, first, seed=1, limits=limits)
        return [continued_sample(trunk, make_sample(50, seed=seed)) for seed in range(2, 7)]
    if "linear_attention" in (getattr(model.config.get_text_config(), "layer_types", None) or ()):
        # Without the kernels of a GPU, gated delta nets compute each document by itself, padded to a multiple of 64
        # tokens. The estimate is that of one document.
        num_media_tokens = make_sample(1, first, seed=1, limits=limits).length - 1
        return [make_sample(384 - num_media_tokens, first, seed=1, limits=limits)]
    texts = ((60, first), (50, second), (101, ()))
    return [make_sample(length, pictures, seed=length, limits=limits) for length, pictures in texts]


def _row(number: int, size: tuple[int, int], question: str, seed: int) -> Sample:
    turns = Turn("user", f"<image>{question}"), Turn("assistant", f"Answer {number} of some words.")
    return Sample(turns, (MediaRef(None, make_picture(*size, seed=seed)),), "rows.jsonl", number)


def batch_of(model: SmallModel, setting: str) -> Batch:
    """A micro-batch for a setting of ``SETTINGS``."""
    spec = model.spec
    if spec.has_audio:
        batch = traced_batch(spec, RankTokens(computed=400, vision=100, audio=200), Axes())
        return batch.map(lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor)
    is_tree = setting == "trees"
    collate: Callable[..., Any] = collate_tree if is_tree else collate_packs
    return _with_targets(collate(samples_of(model, share_prefix=is_tree), spec))


def _with_targets(batch: B) -> B:
    """As the estimate assumes: the last half of the tokens are targets."""
    count = batch.input_ids.shape[1]
    targets = torch.arange(count - count // 2, count)
    return dataclasses.replace(
        batch, labels=torch.zeros_like(batch.labels), target_positions=targets, loss_weights=None
    )


def tokens_of(batch: Batch, spec: InputSpec) -> RankTokens:
    """The numbers of tokens that a plan has of this micro-batch."""
    pads = {kind: pad_id for kind, pad_id in spec.pad_ids.items() if spec.family.taken_as(kind) == kind}
    counts = {kind: int((batch.input_ids == pad_id).sum()) for kind, pad_id in pads.items()}
    tokens = RankTokens(
        computed=batch.input_ids.numel(),
        audio=counts.pop("audio", 0),
        vision=sum(counts.values()),
        keys=len(batch.key_index) if isinstance(batch, TreeBatch) else 0,
    )
    if isinstance(batch, ShardedBatch):
        routes = batch.shard.routes
        num_local = {kind: sum(route.send_counts) for kind, route in routes.items()}
        return dataclasses.replace(tokens, num_local_vision_tokens=num_local.get("image", 0))
    return tokens


def predicted_bytes(model: SmallModel, setting: str, tokens: RankTokens) -> float:
    """The memory of a step, as ``packtool train --dry-run`` estimates it for one rank."""
    config = model.run_config(setting)
    empty = model_without_weights(config, copy.deepcopy(model.config), torch.float32)
    axes = _AXES if setting == SHARED else None
    options: dict[str, Any] = {"dtype": torch.float32, "world_size": 1, "micro_batches": [tokens], "axes": axes}
    estimate = estimate_memory(config, empty, model.config, **options)
    assert estimate.activations is not None, f"{model.name} cannot be traced"
    return estimate.total * 2**30


def measured_bytes(model: SmallModel, setting: str, batch: Batch, parallel: SequenceParallel | None = None) -> int:
    """The memory of a step: weights, gradients and optimizer, and the peak of all that the step allocates."""
    bare: Any = auto_class(model.config).from_config(copy.deepcopy(model.config), attn_implementation="sdpa")
    trained = make_trainable(bare.float(), model.run_config(setting))
    set_traced_attention(trained, parallel)
    trained.train()
    parameters = [parameter for parameter in trained.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=0.0)
    optimizer.step()
    loss_function = LossFunction(trained)

    def step() -> None:
        for _ in range(2):
            loss_function(trained, batch).weighted_sum().backward()
        optimizer.step()

    loss_function(trained, batch).weighted_sum().backward()  # the libraries' own buffers
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    lasting = [*trained.parameters(), *(parameter.grad for parameter in parameters), *states]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in lasting}
    return sum(storages.values()) + _peak_allocated(step)


def _peak_allocated(function: Callable[[], None]) -> int:
    """The largest number of bytes that the CPU's allocator has given to a function at a time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    results: Any = profiler.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def compare(model: SmallModel, setting: str) -> tuple[float, int]:
    """Predicted and measured bytes of a step."""
    batch = batch_of(model, setting)
    tokens = tokens_of(batch, model.spec)
    return predicted_bytes(model, setting, tokens), measured_bytes(model, setting, batch)


def compare_shared(models: Sequence[SmallModel], folder: Path) -> dict[str, tuple[float, int]]:
    """Predicted and measured bytes of steps of two ranks that share each sequence: of the rank that needs more."""
    run_ranks(2, _measure_shared, models, folder, scratch=folder)
    ranks: list[Mapping[str, Any]] = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    compared = {}
    for model in models:
        figures = max((rank[model.name] for rank in ranks), key=lambda each: int(each["bytes"]))
        num_bytes = figures.pop("bytes")
        compared[model.name] = predicted_bytes(model, SHARED, RankTokens(**figures)), num_bytes
    return compared


def _measure_shared(models: Sequence[SmallModel], folder: Path) -> None:
    mesh._start = wait_for_release(mesh._start)
    dist.init_process_group("gloo")
    parallel = SequenceParallel.on_mesh(_AXES, "cpu")
    figures: dict[str, dict[str, int | None]] = {}
    for model in models:
        samples = samples_of(model, share_prefix=False)
        batch = _with_targets(collate_shard(samples, model.spec, parallel.split))
        tokens = tokens_of(batch, model.spec)
        figures[model.name] = {**vars(tokens), "bytes": measured_bytes(model, SHARED, batch, parallel)}
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(figures))


def wait_for_release(start: Callable[..., Any]) -> Callable[..., Any]:
    """As ``mesh._start``; whoever waits waits until gloo's threads, too, have let go of what is sent."""

    def started(collective: Callable[..., Any], received: Tensor, sent: Tensor, *counts: list[int], group: Any) -> Any:
        holders = [(tensor, _num_holders(tensor)) for tensor in (received, sent)]
        finish = start(collective, received, sent, *counts, group=group)

        def wait() -> Tensor:
            nonlocal finish
            result = finish()
            finish = None
            wait_for(lambda: all(_num_holders(tensor) <= before for tensor, before in holders))
            holders.clear()
            return result

        return wait

    return started


def _num_holders(tensor: Tensor) -> int:
    """Of the tensor itself, which gloo's threads share, and of its memory, of which they make views."""
    return tensor._use_count() + int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
