"""Losses that only the pooled vector of a text can lower: a bag of words, and RetroMAE's decoder."""
