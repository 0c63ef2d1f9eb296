"""Folders of other programs as the target of a reshard: a format is one `OutputFormat`."""
