"""Data of latent jobs: sentences, vocabulary, batches, and the random numbers of a step."""
