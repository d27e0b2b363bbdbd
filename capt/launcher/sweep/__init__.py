"""Hyperparameter sweeps on Ray Tune. Knows no task: a trial is a job, and its score a validation metric."""
