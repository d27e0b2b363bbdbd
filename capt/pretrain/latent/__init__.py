"""Latent-variable models of text: VAE, implicit VAE and contrastive latent variables (clVAE, UAI 2022)."""
