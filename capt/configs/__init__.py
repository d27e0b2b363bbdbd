"""The shipped jobs: YAML files, found through ``importlib.resources`` wherever the package is installed."""
