"""The foundation of all slices: network, machine, grids of chunks. No format, no store."""
