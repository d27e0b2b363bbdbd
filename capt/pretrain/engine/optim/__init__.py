"""Optimizers by name, and what each of them keeps."""
