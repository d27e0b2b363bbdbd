"""Configuration of jobs: YAML with ``base:`` -> dotlist overrides -> pydantic. Imports no torch."""

from capt.pretrain.config.load import flat_keys, flatten, load_job, load_mapping, resolve_path
from capt.pretrain.config.schema import Job

__all__ = ["Job", "flat_keys", "flatten", "load_job", "load_mapping", "resolve_path"]
