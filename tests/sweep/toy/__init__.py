"""A task for sweeps: its metric is a curve that the learning rate and the seed decide, and it can fail."""
