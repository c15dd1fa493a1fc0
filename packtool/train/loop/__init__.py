"""The run itself: transformers' Trainer, its arguments and callbacks, loaders, and what is measured."""
