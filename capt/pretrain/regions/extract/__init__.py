"""Region features of one's own pictures, by a vision model in a local Hugging Face folder."""
