"""Fine-tuning jobs, on the same loop as pretraining."""
