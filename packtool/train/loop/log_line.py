"""The figures that a user sees of every log line, and what each of them is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from packtool.simulate.hardware import peak_tflops
from packtool.train.prepare.prepared import PreparedRun

_VAL_LOSS = "val loss"
_CHANNEL_LOSSES = "loss by channel"
_MAX_CHANNELS = 8  # whose losses are shown
_WAITS = ("data_wait", "copy_wait", "log_wait")


def heading_lines(run: PreparedRun, gpu: str | None) -> Iterator[str]:
    """What each figure of a log line is, and its unit; said once, before the first step.

    Args:
        gpu: name of this rank's GPU, None without one.
    """
    waited_for = "data / the log" if gpu is None else "data / copies to the GPU / the log"
    told = {} if run.config.streaming else {"epoch": "passes over the data so far"}
    told |= {
        "loss": "mean over target tokens, in nats",
        "grad norm": "length of the gradient of all trained weights, before it is clipped",
        "lr": "learning rate",
        "targets/s": "target tokens a second, all processes together",
        "fill": "tokens of samples, of all that are computed",
        "waiting": f"shares of the time that steps waited for {waited_for}",
        "memory": f"the most that this process has held so far of its {'machine' if gpu is None else 'GPU'}, in GiB",
    }
    if run.tells_channels:
        told[_CHANNEL_LOSSES] = "the loss of each channel; in a mixture, of each source"
    if run.config.media_cache is not None:
        told["kept"] = "pictures and videos that were in the media cache, of all that this process loaded"
    if run.config.router_aux_loss_coef:
        told["balance"] = "load-balancing loss of the experts, before --router-aux-loss-coef; even routers have k"
    if run.config.torch_compile:
        told["padding"] = "tokens that make micro-batches one of a few lengths, of all that this process computes"
    if gpu is not None and (peak := peak_tflops(gpu)) is not None:
        told["MFU"] = f"FLOP/s of the model, of the {peak:,.0f} TFLOP/s that the GPU has at its best in 16 bits"
        told["HFU"] = "the same with activations and logits that are computed again"
    if run.validation is not None:
        told[_VAL_LOSS] = "the loss of the val split, a line of its own"
    yield "log lines, each of the steps since the one before (metrics.jsonl has more):"
    width = max(map(len, told))
    yield from (f"  {name:{width}}  {meaning}" for name, meaning in told.items())


OBJECTIVE_LINE = (
    "  objective  what training minimizes: losses times their weights, over the number of target tokens, or with "
    "--loss-reduction sample the mean over samples"
)


def shown_figures(logs: Mapping[str, Any], *, has_epochs: bool) -> dict[str, float | int | str]:
    """The figures of a log line that are shown, by the names of ``heading_lines``.

    Args:
        logs: a line of ``metrics.jsonl``, of training or of an evaluation.
        has_epochs: False for a stream, whose number of rows is unknown.
    """
    shown: dict[str, float | int | str] = {"epoch": f"{logs['epoch']:.2f}"} if has_epochs else {}
    if "loss" not in logs:
        return shown | {_VAL_LOSS: round(logs["eval_loss"], 4)}
    # Without targets there is no mean; what --on-bad-media skip leaves out may be all that a step has.
    shown["loss"] = round(float(logs["loss"]), 4) if logs["target_tokens"] else "none"
    if "objective" in logs:
        shown["objective"] = round(float(logs["objective"]), 4)
    if (norm := logs.get("grad_norm")) is not None:
        shown["grad norm"] = float(f"{norm:.3g}")
    shown |= {
        "lr": float(f"{logs['learning_rate']:.3g}"),
        "targets/s": round(logs["target_tokens_per_second"]),
        "fill": f"{logs['fill']:.1%}",
        "waiting": "/".join(f"{100 * logs[name]:.0f}" for name in _WAITS if name in logs) + "%",
        "memory": f"{logs['memory_gib']:.1f} GiB",
    }
    losses = {name.removeprefix("loss_"): value for name, value in logs.items() if name.startswith("loss_")}
    if losses:
        texts = [f"{name} {value:.4g}" for name, value in list(losses.items())[:_MAX_CHANNELS]]
        num_more = len(losses) - len(texts)
        shown[_CHANNEL_LOSSES] = ", ".join(texts) + (f", {num_more} more in metrics.jsonl" if num_more else "")
    if "media_cache_hits" in logs:
        shown["kept"] = f"{logs['media_cache_hits']:.0%}"
    if "router_balance" in logs:
        shown["balance"] = round(logs["router_balance"], 4)
    if "padding" in logs:
        shown["padding"] = f"{logs['padding']:.1%}"
    if "mfu" in logs:
        shown |= {"MFU": f"{logs['mfu']:.0%}", "HFU": f"{logs['hfu']:.0%}"}
    return shown
