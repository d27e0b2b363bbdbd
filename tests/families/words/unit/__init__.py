"""Tests of the word embeddings."""
