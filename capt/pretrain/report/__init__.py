"""The report of runs and sweeps: an offline HTML page, curves and JSON. Their records are read without matplotlib."""
