"""What runs in a watched trainer."""
