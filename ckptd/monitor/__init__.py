"""Communicator health: what each rank shows, and what is wrong with whom."""
