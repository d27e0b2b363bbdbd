"""Training on pairs of texts: a query and the documents that answer it."""
