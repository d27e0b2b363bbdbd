"""The foundation: errors, files, verification, records, random numbers. Imports nothing of the project."""
