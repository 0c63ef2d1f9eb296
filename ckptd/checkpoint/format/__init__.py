"""What is on disk: pure data, no I/O, no torch. ``docs/spec/format-1.md`` is the normative text."""
