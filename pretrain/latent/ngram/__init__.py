"""n-gram language models, for forward and reverse perplexity."""
