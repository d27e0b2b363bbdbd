"""What pretraining tasks with the CAPT loss share: the term, the task, the watch for collapse."""
