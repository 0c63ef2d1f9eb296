"""Devices and the board of ranks, for every slice that imports torch."""
