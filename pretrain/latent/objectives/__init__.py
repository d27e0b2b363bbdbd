"""The objectives of the tables: one function a row."""
