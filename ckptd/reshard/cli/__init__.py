"""Verbs on layouts: `reshard`, `export`, `lay`."""
