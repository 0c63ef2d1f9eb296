"""Lay, the layout language: which rank-local tensor holds which part of which logical tensor."""
