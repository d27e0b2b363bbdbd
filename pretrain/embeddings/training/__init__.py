"""Updates of the tables."""
