"""Moving bytes: writing, committing, reading, retention. No torch."""
