"""What a job needs and how long it takes on given devices, before it is run."""
