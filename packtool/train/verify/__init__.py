"""``packtool verify``: packed samples against each sample alone."""
