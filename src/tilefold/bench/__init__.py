"""Measuring: named cases, contestants in turns, no speed without exactness, and the report."""
