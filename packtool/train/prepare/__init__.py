"""Everything of a run that is decided before torch is imported: what fits, what is planned, what a checkpoint holds."""
