"""From lengths to the exact contents of every training step, as integers: numpy only, no I/O, pure functions."""
