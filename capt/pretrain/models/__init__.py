"""Encoders and their heads, and the tables of their names in Hugging Face's formats."""
