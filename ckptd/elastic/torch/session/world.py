"""`World`: rank, size, shape and resume step of a generation, out of environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptd.elastic.placement import Coordinate
from ckptd.elastic.policy import Shape
from ckptd.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class World:
    """One rank of one generation.

    Attributes
    ----------
    generation
        Rises whenever the ranks change; 0 without a launcher of ckptd.
    rank, world_size, local_rank
        As ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK``.
    shape
        Sizes of the layout: pipeline stages, data-parallel replicas, tensor-parallel ranks.
    place
        Where this rank is in it.
    resume_step
        The last step that the controller knew to be committed; what `Checkpointer.load` finds may
        be later. 0 if none.
    """

    generation: int = 0
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    shape: Shape = field(default_factory=Shape)
    place: Coordinate = field(default_factory=lambda: Coordinate(0, 0, 0))
    resume_step: int = 0

    @staticmethod
    def of(environ: Mapping[str, str]) -> World:
        """Return what the variables of a launcher say; a world of one rank where there are none.

        Raises
        ------
        UsageError
            They contradict one another.
        """
        world_size = _number(environ, "WORLD_SIZE", 1)
        rank = _number(environ, "RANK", 0)
        shape = _three(environ, "CKPTD_SHAPE") or (1, world_size, 1)
        place = _three(environ, "CKPTD_PLACE") or (0, rank, 0)
        found = World(
            generation=_number(environ, "CKPTD_GENERATION", 0),
            rank=rank,
            world_size=world_size,
            local_rank=_number(environ, "LOCAL_RANK", 0),
            shape=Shape(*shape),
            place=Coordinate(*place),
            resume_step=_number(environ, "CKPTD_STEP", 0),
        )
        pp, dp, tp = place
        if found.shape.world != world_size or (pp * shape[1] + dp) * shape[2] + tp != rank:
            raise _bad("CKPTD_SHAPE, CKPTD_PLACE", f"{shape}, {place}, rank {rank}/{world_size}")
        return found

    def mesh(self, device: str = "cpu") -> DeviceMesh:
        """Return the device mesh of the layout, with dimensions ``pp``, ``dp`` and ``tp``.

        The default process group must exist. Every rank calls this.
        """
        from torch.distributed.device_mesh import init_device_mesh

        shape = (self.shape.pp, self.shape.dp, self.shape.tp)
        return init_device_mesh(device, shape, mesh_dim_names=("pp", "dp", "tp"))


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, str(default))
    if not text.isdecimal():
        raise _bad(name, text)
    return int(text)


def _three(environ: Mapping[str, str], name: str) -> tuple[int, int, int] | None:
    text = environ.get(name)
    if not text:
        return None
    parts = text.split(",")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise _bad(name, text)
    pp, dp, tp = map(int, parts)
    return pp, dp, tp


def _bad(name: str, found: str) -> UsageError:
    return UsageError(
        "the environment lacks the variables of a rank",
        where=name,
        found=found[:200],
        hint="ckptd run sets these variables",
    )
