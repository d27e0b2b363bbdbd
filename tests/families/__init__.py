"""Tests of what is beside the core: pictures, latent variables and words."""
