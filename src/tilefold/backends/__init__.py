"""Hands that run the fold. Backends never import each other."""
