"""The limits of one medium: the export's, but for what its row says of it, in the words of Qwen's tools."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from packtool.encode.families.base import ImageLimits, VideoLimits
from packtool.media.opening import MediaProblem, label
from packtool.rows.sample import MediaRef


def of_image(limits: ImageLimits, ref: MediaRef) -> ImageLimits:
    """The limits of a picture.

    Raises:
        ValueError: if its row's contradict each other.
    """
    own = dict(ref.limits)
    return replace(limits, **_bounds(own, "pixels", limits.min_pixels, limits.max_pixels)) if own else limits


def refuse_own_limits(ref: MediaRef) -> None:
    """Raise if a row has limits of its own for a medium whose size the model's processor decides.

    Raises:
        MediaProblem: naming the limit.
    """
    if ref.limits:
        told = f"its row has {ref.limits[0][0]}, and this model's processor decides sizes by itself"
        raise MediaProblem("media_unsupported", f"{label(ref)}: {told}")


def of_video(limits: VideoLimits, ref: MediaRef) -> VideoLimits:
    """The limits of a video; pixels are those of a frame, but for ``total_pixels``.

    Raises:
        ValueError: if its row's contradict each other.
    """
    own = dict(ref.limits)
    if not own:
        return limits
    found: dict[str, Any] = _bounds(own, "frames", limits.min_frames, limits.max_frames)
    total = int(own["total_pixels"]) if "total_pixels" in own else None
    if limits.over_all_frames:
        given = {f"frame_{name}": int(own[name]) for name in ("min_pixels", "max_pixels") if name in own}
        found |= {**given, **({"max_pixels": total, "min_pixels": min(limits.min_pixels, total)} if total else {})}
    else:
        found |= _bounds(own, "pixels", limits.min_pixels, limits.max_pixels)
        found |= {"total_pixels": total} if total else {}
    return replace(limits, fps=float(own.get("fps", limits.fps)), **found)


def _bounds(own: dict[str, float], what: str, least: int, most: int) -> dict[str, int]:
    """Both bounds, of which one that the row does not give makes room for the other."""
    low, high = own.get(f"min_{what}"), own.get(f"max_{what}")
    if low is not None and high is not None and low > high:
        raise ValueError(f"its row wants at least {low:g} and at most {high:g} {what}")
    return {
        f"min_{what}": int(low if low is not None else min(least, high or least)),
        f"max_{what}": int(high if high is not None else max(most, low or most)),
    }
