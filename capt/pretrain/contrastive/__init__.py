"""Shared parts of pretraining tasks with the CAPT loss: the term, the task, the watch for collapse."""
