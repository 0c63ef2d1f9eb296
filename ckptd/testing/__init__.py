"""Contract tests and helpers that authors of stores, readers and plugins use in their own tests."""
