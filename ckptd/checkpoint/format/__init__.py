"""The on-disk format: pure data, no I/O, no torch. ``docs/spec/format-1.md`` is normative."""
