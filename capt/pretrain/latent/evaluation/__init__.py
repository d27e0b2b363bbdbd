"""Bounds, divergences, generated text and clusters."""
