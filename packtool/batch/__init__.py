"""Encoded samples become the tensors of a micro-batch."""
