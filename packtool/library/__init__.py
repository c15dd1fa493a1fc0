"""The library: what ``import packtool`` offers, over what the commands call."""
