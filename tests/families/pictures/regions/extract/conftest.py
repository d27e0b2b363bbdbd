from tests.families.pictures.regions.extract.support import models

__all__ = ["models"]
