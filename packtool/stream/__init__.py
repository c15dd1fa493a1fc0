"""Rows become packs while a run reads them: no cache, a bounded buffer, and a position that can be gone back to."""
