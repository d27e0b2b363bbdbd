"""Rerankers: a cross-encoder on a pretrained encoder, trained on a query's candidates."""
