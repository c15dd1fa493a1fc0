"""``packtool eval`` and evaluation between steps: every sample for itself."""
