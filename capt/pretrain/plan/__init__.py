"""Memory, traffic and time of a job on given devices, before it is run."""
