"""Tokenizers: train with SentencePiece, export to ``tokenizer.json`` with the same ids, encode text."""
