"""Engines: a module with its optimizer, behind the calls of a training step."""
