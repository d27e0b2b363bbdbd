"""ModernBERT (Warner et al. 2024): its configuration, its attention over windows and documents, its layers."""
