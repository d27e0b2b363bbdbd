"""The protocol of saving, leases and restarts: a model explored to the last state, and the code against the model."""
