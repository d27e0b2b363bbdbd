"""The task ``capt_pairs``: an embedding model from pairs of texts that mean the same, on any encoder."""
