"""Encoders, decoders, posteriors and critics."""
