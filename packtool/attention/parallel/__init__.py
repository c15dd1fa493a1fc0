"""Attention of a packed sequence that several processes share: Ulysses, ring, all-gather, and their exchanges."""
