"""Encoders that others pretrained: which families are known, reading their folders, and running them."""
