"""Who holds which chunk: grids, owners and the copy planner. Pure functions, no I/O, no torch."""
