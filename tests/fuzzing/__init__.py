"""Coverage-guided fuzzing of what reads bytes that a stranger may have written."""
