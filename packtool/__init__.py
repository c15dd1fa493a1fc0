"""Turns multimodal conversations into packed training steps."""

__version__ = "0.1.0"
