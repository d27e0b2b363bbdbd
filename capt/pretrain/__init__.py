"""Contrastive pretraining: the engine, the contrastive objectives, models, data and the jobs."""
