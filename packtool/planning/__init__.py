"""Plan which samples share a pack, and which rank trains each pack in which step."""
