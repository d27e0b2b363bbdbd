"""Checkpoint -> Hugging Face, sentence-transformers or ONNX folder, and Hugging Face -> checkpoint."""
