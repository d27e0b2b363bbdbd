"""Tests of what stands beside the core: pictures, latent variables and words."""
