"""Checkpoints: what is on disk, writing, reading, keeping."""
