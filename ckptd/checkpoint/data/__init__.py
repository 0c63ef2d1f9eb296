"""Which sample belongs to which step, whatever the world is."""
