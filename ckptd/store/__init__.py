"""Where bytes live: the store contract and its implementations."""
