"""Verbs on the checkpoints of a root."""
