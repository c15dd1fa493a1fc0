"""Samples become tokens, labels and media spans."""
