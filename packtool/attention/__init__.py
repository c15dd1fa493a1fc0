"""Attention that knows where the documents of a pack begin and end."""
