"""The directory in which export and train meet."""
