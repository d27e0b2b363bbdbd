"""Encode corpora, measure retrieval and mine hard negatives, on any number of ranks and without a network."""
