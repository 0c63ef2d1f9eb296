"""Checkpoints: what is on disk, writing, reading, keeping. Imports no other slice."""
