"""Sweeps with real processes and a real Ray, and jobs that need no torch, so that a trial takes a second."""
