"""The on-disk format: pure data, no I/O; ``docs/spec/format-1.md`` is normative."""
