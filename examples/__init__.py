"""Scripts to begin from; a package, so that the Makefile finds them whatever else is installed under this name."""
