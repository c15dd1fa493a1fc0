"""Packs written out, for trainers that want finished ones."""
