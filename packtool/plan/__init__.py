"""The exact contents of every training step, as integers, from lengths: numpy only, no I/O, pure functions."""
