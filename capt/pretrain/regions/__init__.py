"""Region features of pictures: a memory-mapped store, its importers, and extraction from one's own pictures."""
