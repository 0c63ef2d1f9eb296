"""The foundation of all slices: network, machine, grids of chunks; no format, no store."""
