"""``packtool demo``: a synthetic dataset and a small model, and a run through both stages."""
