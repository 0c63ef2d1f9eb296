"""Random programs: a space, and two layouts of it with their meshes and sizes.

Everything is drawn from one source of random numbers, so a pair is reproduced by its seed, or
drawn by hypothesis. What is drawn is a right program: splits that say `even` divide, no two mesh
axes that cut a tensor depend on each other, each axis comes once on each way through the sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from hypothesis import strategies as st

from ckptd.lay.resolve import Bound, resolve
from ckptd.lay.syntax import show
from ckptd.lay.syntax.tree import File, Let, Space
from tests.lay.agreement.programs_random_constructs import constructs
from tests.lay.agreement.programs_random_layout import LayoutMaker
from tests.lay.agreement.programs_random_space import SpaceMaker, families

__all__ = ["Pair", "pair", "pairs"]


@dataclass(frozen=True)
class Pair:
    """A program with the layouts ``src`` and ``dst`` over one space.

    Attributes
    ----------
    file
        The program.
    source, target
        Its layouts.
    """

    file: File
    source: Bound
    target: Bound

    @property
    def constructs(self) -> set[str]:
        """Which constructs occur in it."""
        return constructs(self.file, (self.source.layout, self.target.layout))

    def __str__(self) -> str:
        """Return the program as text, with the sizes."""
        return f"{show(self.file)}\n# sizes: {dict(self.source.sizes)}"


def pair(rng: Random) -> Pair:
    """Draw a pair of layouts over one space."""
    world = SpaceMaker(rng).make()
    makers = [LayoutMaker(rng, world, name) for name in ("src", "dst")]
    layouts = [m.make() for m in makers]
    space = Space("sp", tuple(f for b in world.blocks for f in families(b)), world.states)
    lets = [Let(a, d) for a, d in world.refined.items()]
    meshes = [m for maker in makers for m in maker.meshes]
    file = File((*lets, space, *meshes, *layouts))
    source, target = (Bound(resolve([file], n), dict(world.sizes)) for n in ("src", "dst"))
    return Pair(file, source, target)


def pairs() -> st.SearchStrategy[Pair]:
    """Return pairs as hypothesis draws them."""
    return st.randoms(use_true_random=False).map(pair)
