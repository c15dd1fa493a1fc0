"""Media files: measured from their header for export, decoded for training."""
