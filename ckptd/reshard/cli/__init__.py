"""Verbs on layouts: check, draw, reshard, and what the layout policy would do."""
