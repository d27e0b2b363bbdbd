"""The ``capt`` command line, and how it starts a job: on this host, on several, or on a Slurm cluster."""
