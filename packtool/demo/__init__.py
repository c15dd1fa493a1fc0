"""The tiny world of ``packtool demo``: pictures, rows and a model made on the spot, and the run through both stages."""
