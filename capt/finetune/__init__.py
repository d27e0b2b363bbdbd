"""Fine-tuning: what every fine-tuning task shares. A task with data sets and metrics of its own is a subpackage."""
