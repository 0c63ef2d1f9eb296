"""Going on with other ranks: what to train on, in which layout, and who decides."""
