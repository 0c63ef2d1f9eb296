"""The service of a job: takes what agents see, diagnoses, remembers and shows it."""
