"""A small fine-tuning task of the tests' own: two pictures a row, soft targets over three answers."""
