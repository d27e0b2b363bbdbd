"""A task of the tests' own: what the engine does is tested without any model of the product."""
