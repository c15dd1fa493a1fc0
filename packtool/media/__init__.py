"""Media files: measured from their header when exporting, decoded when training."""
