"""Looks after a job that was started: notices ranks that hang, says what happened, starts the job again."""
