"""Grammars: compiled once, followed per sequence, and turned into masks of the allowed tokens."""
