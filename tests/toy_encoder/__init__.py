"""An encoder of another distribution: ERNIE, whose positions count from 0 and whose segments are a key of its own."""
