"""The training step and its schedules."""
