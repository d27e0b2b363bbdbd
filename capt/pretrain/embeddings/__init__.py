"""The task ``ace``: word embeddings learned against noise, or against an adaptive sampler of negatives (ACE)."""
