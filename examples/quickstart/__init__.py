"""The data of ``make quickstart`` and of its relatives."""
