"""Decisions before work: which backend runs a call, and how. Holds no tensor."""
