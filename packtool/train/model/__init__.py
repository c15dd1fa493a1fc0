"""Models ready to be trained: loaded, routed, frozen or adapted, with their precision, memory and loss."""
