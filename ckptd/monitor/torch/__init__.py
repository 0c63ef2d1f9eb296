"""The part in a watched trainer."""
