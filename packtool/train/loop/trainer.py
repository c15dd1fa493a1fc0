"""Training of optimizer steps as they are planned, by a subclass of transformers' Trainer.

The Trainer would give every step the same number of micro-batches; here the plan defines them. Therefore one batch of
its dataloader (``StepLoader``) is a whole optimizer step (``TrainingStep``), and the whole run is one of its epochs. It
still does placement, wrapping, optimizer, clipping, learning-rate schedule, logging and checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils.memory import clear_device_cache
from peft import PeftModel
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.distributed.checkpoint import save_optimizer_distributed
from transformers.distributed.utils import gather_full_state_dict
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.training_args import OptimizerNames

from packtool.attention.parallel.mesh import SequenceParallel
from packtool.batch.batch import B, Batch, PackedBatch, PaddedBatch, ShardedBatch, SkippedSample, TreeTargets
from packtool.cache.evaluation_file import plain_json
from packtool.train.evaluate.per_sample import evaluate
from packtool.train.loop.checks import refuse_adam_mini, refused_by_transformers
from packtool.train.loop.log import Meter, SampleLosses
from packtool.train.loop.step_loader import StepLoader, TrainingStep
from packtool.train.loop.watch import StepWatch
from packtool.train.model.active_layers import ActiveLayers
from packtool.train.model.loss import (
    LossFunction,
    ReferenceModel,
    RouterBalance,
    StepMean,
    TargetLosses,
    base_model,
)
from packtool.train.model.low_precision import enable_rounding
from packtool.train.model.muon import MuonAdamW
from packtool.train.model.precision import KahanAdamW, SavedPrecision, load_master_weights, save_master_weights
from packtool.train.model.sharding import OPTIMIZER_FOLDER, load_optimizer
from packtool.train.model.trainable import split_by_rate
from packtool.train.prepare.checkpoint import PREFIX, loading, saving
from packtool.train.prepare.figures import StepFigures
from packtool.train.prepare.workers import workers_of


class EmbeddingNoise:
    """Noise on the embeddings of ``batch`` during training (NEFTune).

    Uniform noise of at most alpha / sqrt(L d), with sample length L (not that of its pack) and embedding width d (Jain
    et al. 2023, "NEFTune: Noisy Embeddings Improve Instruction Finetuning").

    Args:
        model: bare, or inside an adapter; not yet wrapped for several processes.

    Attributes:
        batch: the micro-batch that the model runs on; None for no noise.
    """

    def __init__(self, model: nn.Module, alpha: float) -> None:
        self.alpha = alpha
        self.batch: Batch | None = None
        base_model(model).get_input_embeddings().register_forward_hook(self._add)

    def _add(self, module: nn.Module, _: Any, embedded: Tensor) -> Tensor:
        """Return the embeddings (B, T, d) of the current micro-batch with noise; others, and evaluation, unchanged."""
        if self.batch is None or not module.training or embedded.shape[:2] != self.batch.input_ids.shape:
            return embedded
        lengths = sample_lengths(self.batch).to(embedded.device)
        bound = self.alpha / (lengths * embedded.shape[-1]).sqrt()
        noise = torch.empty_like(embedded).uniform_(-1.0, 1.0)
        return embedded + noise * bound[..., None].to(embedded.dtype)


def sample_lengths(batch: Batch) -> Tensor:
    """Return the number of tokens of each position's sample, float32 (B, T)."""
    if isinstance(batch, PaddedBatch):
        return batch.attention_mask.sum(1, keepdim=True).clamp(min=1).float().expand(batch.input_ids.shape)
    assert isinstance(batch, (PackedBatch, ShardedBatch))
    assert not isinstance(batch, TreeTargets), "a shared prefix belongs to samples of several lengths"
    positions = torch.arange(batch.input_ids.numel(), device=batch.input_ids.device)
    lengths = torch.tensor([*batch.lengths, 1], device=positions.device, dtype=torch.float32)
    return lengths[batch.documents_of(positions).clamp(max=len(batch.lengths))].view(batch.input_ids.shape)


class DeviceCopies:
    """Copies of micro-batches to a device, on a separate CUDA stream.

    There they overlap with the previous micro-batch or the optimizer. This needs page-locked memory, which the
    dataloader provides on CUDA. CUDA events measure how long the computation waited.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cuda: Any = torch.cuda
        self._stream = cuda.Stream(device) if device.type == "cuda" else None
        self._waits: list[tuple[Any, Any]] = []

    def to_device(self, batch: B) -> B:
        """Return the micro-batch on the device, ready for the current stream."""
        if self._stream is None:
            return batch.to(self._device)
        with torch.cuda.stream(self._stream):
            on_device = batch.to(self._device, non_blocking=True)

        # Let the computation wait for the copy, between two events that measure this.
        cuda: Any = torch.cuda
        computing = cuda.current_stream(self._device)
        wait_begin = cuda.Event(enable_timing=True)
        wait_end = cuda.Event(enable_timing=True)
        wait_begin.record(computing)
        computing.wait_stream(self._stream)
        wait_end.record(computing)
        self._waits.append((wait_begin, wait_end))

        def keep_until_computed(tensor: Tensor) -> Tensor:
            # Otherwise the memory could be reused for the next copy while the computation still reads it.
            tensor.record_stream(computing)
            return tensor

        return on_device.map(keep_until_computed)

    def wait_seconds(self) -> float | None:
        """Return how long the computation waited for copies since the last call; None without copies.

        Does not wait for the device: copies that it has not reached yet are counted in a later call.
        """
        if self._stream is None:
            return None
        reached = [pair for pair in self._waits if pair[1].query()]
        self._waits = self._waits[len(reached) :]
        return sum(begin.elapsed_time(end) for begin, end in reached) / 1e3


class PackTrainer(Trainer):
    """Trainer of the steps of a ``StepLoader``.

    Args:
        model: made trainable, on the host or the device.
        loader: of this rank; starts at the step after the checkpoint.
        saved: precision of the weights in checkpoints.
        parallel: ranks that share sequences with this one; None without sequence parallelism.
        recomputation: ``LayerSwitch`` of the layers that recompute in each micro-batch; None if always the same.

    Attributes:
        skipped: (step, sample) of this rank's samples whose media could not be loaded; steps are 0-based.
        sample_losses: losses of this rank's samples; None if they are not kept.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        loader: StepLoader,
        *,
        saved: SavedPrecision,
        watch: StepWatch,
        parallel: SequenceParallel | None = None,
        recomputation: Any = None,
    ) -> None:
        self.config = config = loader.run.config
        with _restored_settings(model, args, saves_sharded_optimizer=config.shares_experts):
            super().__init__(model=model, args=args)
        # Packtool logs and shows the progress itself.
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)
        self.loader, self.saved, self.watch = loader, saved, watch
        self.parallel, self.recomputation = parallel, recomputation

        # The copy of the untrained model is made before LossFunction changes the model's head.
        uses_reference = config.asft_alpha is not None
        self.reference = ReferenceModel(model, args.device) if uses_reference else None
        self.loss_function = LossFunction(model)
        self.neftune_noise_alpha = None  # off: the Trainer would scale the noise by the length of the pack
        self.noise = EmbeddingNoise(model, args.neftune_noise_alpha) if args.neftune_noise_alpha else None
        self.balance = RouterBalance(model, config.router_aux_loss_coef) if config.router_aux_loss_coef else None
        self.active_layers = ActiveLayers.of(model, config)
        self._copies = DeviceCopies(args.device)

        self.skipped: list[tuple[int, SkippedSample]] = []
        self.meter = Meter(by_channel=loader.run.source.logs_channels)
        self.sample_losses = SampleLosses() if config.sample_losses else None

    def get_train_dataloader(self) -> Any:
        """Return the loader as it is: its steps are this rank's own, so accelerate must not shard or move them."""
        return self.loader

    def get_batch_samples(
        self, epoch_iterator: Iterator[TrainingStep], num_batches: int, device: torch.device
    ) -> tuple[list[TrainingStep], None]:
        """Return the next step in a list; ranks need not exchange its number of target tokens, which is planned."""
        return list(islice(self.meter.timed(epoch_iterator), num_batches)), None

    def training_step(  # type: ignore[override]  # get_batch_samples returns complete steps
        self, model: nn.Module, step: TrainingStep, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run forward and backward of a step; return its loss, 0-d, times the number of ranks that will average it."""
        self._start_step()
        figures = step.figures
        step_mean = StepMean(figures.units, self.args.world_size)
        total, skipped = self._accumulate_gradients(model, step, step_mean)
        self.skipped += [(self.state.global_step, sample) for sample in skipped]
        if self.config.on_bad_media == "skip":
            figures = self._exclude_skipped(figures, skipped, step_mean)
        self.meter.add_step(figures, None if self.balance is None else self.balance.take_step_loss())
        return step_mean.sum_over_ranks(total)

    def _accumulate_gradients(
        self, model: nn.Module, step: TrainingStep, step_mean: StepMean
    ) -> tuple[Tensor, list[SkippedSample]]:
        """Train all micro-batches of a step; return the sum of their parts of the mean loss, and skipped samples."""
        total = torch.zeros((), device=self.args.device)
        skipped: list[SkippedSample] = []
        for number, host_batch in enumerate(self.meter.timed(step.micro_batches)):
            is_last = number == len(step.planned) - 1
            self.accelerator.gradient_state._set_sync_gradients(is_last)
            if self.recomputation is not None:
                self.recomputation.set_for(host_batch)
            batch = self._copies.to_device(host_batch)
            with self._micro_batch_context(model, batch, step.figures, is_last=is_last):
                total += self._train_micro_batch(model, batch, step_mean, step.planned[number].samples)
            skipped += batch.skipped
        return total, skipped

    def _start_step(self) -> None:
        """Reset the optimizer if other layers become active in this step, and start rounding at its first step."""
        step = self.state.global_step
        layers = self.active_layers
        if layers is not None and layers.resets_optimizer and layers.changes_at(step):
            self._bare_optimizer.state.clear()
        if self.config.qat_start_step:
            enable_rounding(self.model, step >= self.config.qat_start_step)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def _micro_batch_context(
        self, model: nn.Module, batch: Batch, figures: StepFigures, *, is_last: bool
    ) -> Iterator[None]:
        """Enter the contexts in which a micro-batch is trained; ``figures`` are those of its step."""
        with contextlib.ExitStack() as stack:
            # Ranks exchange gradients once, in the last micro-batch. With FSDP they do it in each micro-batch,
            # because otherwise every rank would hold float32 sums of all gradients.
            if not (is_last or self.accelerator.is_fsdp2 or self.config.shares_experts):
                stack.enter_context(self.accelerator.no_sync(model=model))
            if self.active_layers is not None:
                stack.enter_context(self.active_layers.active(self.state.global_step))
            if self.balance is not None:
                stack.enter_context(self.balance.added_to_gradients(batch, figures.tokens, self.args.world_size))
            yield

    def _exclude_skipped(
        self, figures: StepFigures, skipped: Sequence[SkippedSample], step_mean: StepMean
    ) -> StepFigures:
        """Rescale the gradients, because the plan counted samples that some rank has skipped; all ranks must call this.

        ``skipped`` are those of this rank. Return the figures of the step without the skipped samples of all ranks.
        """
        local_counts = [len(skipped), sum(sample.num_target_tokens for sample in skipped)]
        counts = torch.tensor(local_counts, device=self.args.device)
        if self.args.world_size > 1:
            dist.all_reduce(counts)
        num_skipped_samples, num_skipped_targets = counts.tolist()
        num_skipped = num_skipped_samples if self.config.loss_reduction == "sample" else num_skipped_targets
        units = step_mean.remove_units(num_skipped, self.model.parameters())  # type: ignore[union-attr]
        target_tokens = figures.target_tokens - num_skipped_targets
        return dataclasses.replace(figures, units=units, target_tokens=target_tokens)

    def _train_micro_batch(
        self, model: nn.Module, batch: Batch, step_mean: StepMean, planned_samples: Sequence[Any]
    ) -> Tensor:
        """Run forward and backward of a micro-batch; return its contribution to the step's mean loss, 0-d, detached.

        ``step_mean`` divides the sum of the losses by the target tokens, or samples, of the complete step.
        ``planned_samples`` are positions in the caches or samples of a stream, including skipped ones.
        """
        self._enter_training_mode(model)
        if self.noise is not None:
            self.noise.batch = batch
        with self.compute_loss_context_manager():
            target_losses = self._weighted_losses(model, batch)
            self.meter.add_losses(target_losses, batch)
            if self.sample_losses is not None:
                self.sample_losses.add(self.state.global_step, planned_samples, target_losses, batch)
            loss = step_mean.contribution(target_losses.weighted_sum())

        interval = self.args.torch_empty_cache_steps
        if interval is not None and self.state.global_step % interval == 0:
            clear_device_cache()
        self._backward(loss)
        loss = loss.detach()
        self.watch.record_loss(loss)
        return loss

    def _enter_training_mode(self, model: nn.Module) -> None:
        model.train()
        optimizer: Any = self.optimizer
        if callable(getattr(optimizer, "train", None)):  # schedule-free optimizers have training and evaluation modes
            optimizer.train()

    def _weighted_losses(self, model: nn.Module, batch: Batch) -> TargetLosses:
        """The losses of the targets of a micro-batch, with the weights of ASFT, DFT or EAFT if one of them is set."""
        config = self.config
        top_k = 0 if config.eaft_alpha is None else config.eaft_top_k
        losses = self.loss_function(model, batch, top_k, self.reference)
        if config.asft_alpha is not None:
            return losses.with_divergences(config.asft_alpha)
        if config.enable_dft_loss:
            return losses.weighted_by_probability()
        if config.eaft_alpha is not None:
            return losses.weighted_by_entropy(config.eaft_divisor, config.eaft_alpha)
        return losses

    def _backward(self, loss: Tensor) -> None:
        """Run the backward pass of a micro-batch's loss, 0-d."""
        settings: dict[str, Any] = {}
        if self.args.optim in (OptimizerNames.LOMO, OptimizerNames.ADALOMO):  # they update weights in the backward pass
            settings["learning_rate"] = self._get_learning_rate()
        if self.is_deepspeed_enabled:  # otherwise DeepSpeed would divide the loss by the number of micro-batches
            settings["scale_wrt_gas"] = False
        self.accelerator.backward(loss, **settings)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)  # type: ignore[no-untyped-call]
        self.watch.record_norm(0.0 if norm is None else norm, is_scaled=self.accelerator.scaler is not None)
        return norm

    def evaluate_validation(self) -> dict[str, float]:
        """Evaluate the val split, log the result and return it; all ranks call this and get the same figures.

        Returns:
            ``eval_loss``, ``eval_perplexity``, ``eval_token_accuracy``, ``eval_target_tokens``, ``eval_samples``, and
            ``eval_loss/CHANNEL`` for each channel.
        """
        run = self.loader.run
        validation = run.validation
        assert validation is not None, "called only for runs with a val split"
        begin = time.perf_counter()
        # Without a progress, because the terminal shows that of the training.
        evaluation = evaluate(
            self.model_wrapped,
            validation.reader,
            self.loader.spec,
            validation.plan,
            world=run.world,
            num_workers=workers_of(run),
            samples=validation.samples,
            parallel=self.parallel,
        )
        figures = evaluation.metrics()
        self.meter.exclude(time.perf_counter() - begin)
        self.log(dict(figures))
        return figures

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.meter.begin_log()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Complete and write a log line: the exact mean loss since the previous line, and the steps' figures."""
        if "train_loss" in logs:
            # The Trainer's last line averages the sums that training_step returned: that is no mean loss.
            return
        if "loss" in logs:
            measured: dict[str, Any] = {"copy_seconds": self._copies.wait_seconds()}
            if self.config.plans_recomputation:  # without a switch, all layers recompute
                measured["recomputed"] = (1, 1) if self.recomputation is None else self.recomputation.take_counts()
            logs.update(self.meter.take_log_line(logs["loss"], self.accelerator, **measured))
            # The Trainer resets the sum by subtracting it from itself, so it would stay NaN.
            self._tr_loss.zero_()
        super().log(logs, start_time)
        if "loss" in logs:
            self.meter.end_log()
        # trainer_state.json contains these lines, and JSON has no NaN or Infinity.
        self.state.log_history[-1] = plain_json(self.state.log_history[-1])

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0, because the Trainer's estimate needs a batch of its own format."""
        return 0

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer, with separate parameter groups for parts that have their own rates."""
        if self.optimizer is not None:
            return super().create_optimizer(model)
        trained = model or self.model
        assert trained is not None
        assert self.model is not None
        self._choose_optimizer(trained)
        with refused_by_transformers():
            optimizer = super().create_optimizer(model)
        split_by_rate(optimizer, trained, self.model, self.config)
        return optimizer

    def _choose_optimizer(self, trained: Any) -> None:
        """Set the optimizers of packtool that the options name, for the weights of ``trained``."""
        betas = (self.args.adam_beta1, self.args.adam_beta2)
        settings: dict[str, Any] = {"lr": self.args.learning_rate, "betas": betas, "eps": self.args.adam_epsilon}
        if self.config.master_weights == "kahan":
            self.optimizer_cls_and_kwargs = (KahanAdamW, settings)
        if self.config.optim == "adam_mini":
            self.optimizer = self._adam_mini(trained, settings)
        if self.config.optim == "muon":
            self.optimizer = MuonAdamW(trained.named_parameters(), weight_decay=self.args.weight_decay, **settings)

    def _adam_mini(self, trained: Any, settings: dict[str, Any]) -> torch.optim.Optimizer:
        """Return Adam-mini (Zhang et al. 2024, arXiv 2406.16793) for the weights that are trained."""
        from adam_mini import Adam_mini  # an extra

        refuse_adam_mini(trained)
        text = base_model(self.model).config.get_text_config()
        heads = {"n_heads": text.num_attention_heads, "n_kv_heads": text.num_key_value_heads}
        settings = settings | {"weight_decay": self.args.weight_decay, "dim": text.hidden_size, "verbose": False}
        optimizer: Any = Adam_mini(trained.named_parameters(), **settings, **heads)
        optimizer.world_size = self.args.world_size  # it takes the number of GPUs of the machine
        return optimizer

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Save the model: an adapter unchanged, full weights in the precision of the base model."""
        model: Any = self.model
        if self.config.shares_experts:
            state_dict = gather_full_state_dict(model)  # all ranks must call this; empty on all but the first
            if not self.args.should_save:
                return
        if isinstance(model, PeftModel) or not self.args.should_save:
            super()._save(output_dir, state_dict)
            return
        weights = model.state_dict() if state_dict is None else state_dict
        named = model.named_parameters(remove_duplicate=False)  # with all names of a tied weight, as in ``weights``
        trained_names = frozenset(name for name, parameter in named if parameter.requires_grad)
        super()._save(output_dir, self.saved.cast(weights, trained_names))
        # super()._save has written the precision of the weights in memory into the config.
        model.config.dtype = self.saved.dtype
        model.config.save_pretrained(output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save optimizer, schedule and master weights; FSDP and DeepSpeed save master weights with the optimizer."""
        assert self.model is not None
        if self.config.shares_experts:
            folder = os.path.join(output_dir, OPTIMIZER_FOLDER)  # every rank writes its part of the states
            save_optimizer_distributed(self.model, self._bare_optimizer, folder)
            weights = gather_full_state_dict(self.model)
            if self.args.should_save:
                save_master_weights(self.model, self.saved, output_dir, weights)
                scheduler: Any = self.lr_scheduler
                torch.save(scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))
            return
        super()._save_optimizer_and_scheduler(output_dir)
        is_sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if self.args.should_save and not is_sharded and not isinstance(self.model, PeftModel):
            save_master_weights(self.model, self.saved, output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with loading(str(checkpoint), "the optimizer's states or the schedule"):
            if checkpoint is None or not self.config.shares_experts:
                super()._load_optimizer_and_scheduler(checkpoint)
                return
            assert self.model is not None
            load_master_weights(self.model, checkpoint)
            load_optimizer(self.model, self._bare_optimizer, checkpoint)
            scheduler: Any = self.lr_scheduler
            scheduler.load_state_dict(torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the weights, and master weights if the checkpoint has them."""
        if self.config.shares_experts:
            return  # _load_optimizer_and_scheduler loads them
        with loading(resume_from_checkpoint, "the weights"):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            if not self.is_fsdp_enabled and not isinstance(self.model, PeftModel):
                loaded = model or self.model
                assert loaded is not None
                load_master_weights(loaded, resume_from_checkpoint)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Do not warn about missing names: tied and converted weights have others; ``load_master_weights`` checks."""

    @property
    def _bare_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer without accelerate's wrapper."""
        optimizer = self.optimizer
        assert optimizer is not None
        return getattr(optimizer, "optimizer", optimizer)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        checkpoint = os.path.join(str(self.args.output_dir), f"{PREFIX}{self.state.global_step}")
        with saving(checkpoint, num_bytes=self._checkpoint_bytes()):
            super()._save_checkpoint(model, trial)

    def _checkpoint_bytes(self) -> int | None:
        """Estimate the bytes of saved weights, master weights and optimizer states; None if they are sharded."""
        if self.is_fsdp_enabled or self.is_deepspeed_enabled or self.config.shares_experts:
            return None
        trained: Any = self.model
        is_adapter = isinstance(trained, PeftModel)
        weights = [weight for weight in trained.parameters() if weight.requires_grad or not is_adapter]
        values = [value for state in self._bare_optimizer.state.values() for value in state.values()]
        num_bytes = sum(value.nbytes for value in values if isinstance(value, Tensor))
        if not is_adapter:
            num_bytes += sum(weight.numel() * self.saved.dtype.itemsize for weight in weights)
        if is_adapter or self.saved.dtype.itemsize < 4:
            num_bytes += sum(weight.nbytes for weight in weights)
        return num_bytes


@contextlib.contextmanager
def _restored_settings(model: nn.Module, args: TrainingArguments, *, saves_sharded_optimizer: bool) -> Iterator[None]:
    """Restore the settings that must be different while the Trainer is created, or that it changes."""
    model_settings = vars(model.config)
    use_cache = model_settings.get("use_cache")
    save_only_model = args.save_only_model
    # The Trainer refuses to save the optimizer of a model that was sharded while it was loaded. ``PackTrainer`` can
    # save it, so the option is on while the Trainer checks it.
    args.save_only_model = save_only_model or saves_sharded_optimizer
    yield
    args.save_only_model = save_only_model
    # The Trainer disables the KV cache in the model's config, which checkpoints would inherit.
    if use_cache is None:
        model_settings.pop("use_cache", None)
    else:
        model_settings["use_cache"] = use_cache
