from tests.unit.regions.extract.support import models

__all__ = ["models"]
