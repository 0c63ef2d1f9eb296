"""What every slice stands on: network, machine, grids of chunks. No format, no store."""
