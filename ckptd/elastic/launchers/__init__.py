"""What starts workers on a node, and what starts that on nodes: by hand, Slurm, torchrun."""

from __future__ import annotations

__all__: list[str] = []
