"""The GLUE benchmark (Wang et al. 2019): data, fine-tuning, submission files and the report of a sweep over it."""
