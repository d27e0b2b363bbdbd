"""Fault tolerance: the ledger, replicas, stragglers, spikes with their rollbacks, and local checkpoints."""
