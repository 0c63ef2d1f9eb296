"""The part in a trainer that a launcher started: sessions and hooks."""
