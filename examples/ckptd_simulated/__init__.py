"""A job that does not exist, to look at: ``ckptd serve --simulate``."""
