"""Models learn from micro-batches."""
