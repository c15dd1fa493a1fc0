"""Training on paper: hardware, model sizes, distributions of lengths, and what every strategy would cost."""
