"""What starts workers on a node, and what starts that on nodes: by hand, Slurm, torchrun."""

__all__: list[str] = []
