"""The vocabulary, the encoded text, and the pairs of a word and its neighbours."""
