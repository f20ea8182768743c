"""Tests as a library: inputs that find bugs, an error budget, poisoned memory, and one suite of laws for
every backend.
"""
