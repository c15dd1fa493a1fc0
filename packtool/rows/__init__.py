"""Files of rows, and the forms a row can have, become samples."""
