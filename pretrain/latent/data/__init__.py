"""Sentences and clusters: vocabulary, batches of one length, and what a step draws."""
