"""Attention of a packed row that several processes share: Ulysses, ring, all-gather, and the exchanges they need."""
