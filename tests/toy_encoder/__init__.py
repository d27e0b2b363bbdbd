"""An encoder of another distribution: BERT, whose positions count from 0 and whose segments are a key of its own."""
