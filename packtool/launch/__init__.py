"""The environment of a process, and several of them by torchrun."""
