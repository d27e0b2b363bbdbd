"""The toy task's configuration serves this one, too."""

from tests.toy.config import JOB

__all__ = ["JOB"]
