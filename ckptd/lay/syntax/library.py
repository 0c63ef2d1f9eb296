"""Shipped programs by name (``use hf.llama``)."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from importlib import resources

from ckptd.errors import UsageError
from ckptd.lay.syntax.parser import parse
from ckptd.lay.syntax.tree import File

_FOLDER = resources.files("ckptd.lay") / "shipped"
_END = ".lay"


@cache
def names() -> tuple[str, ...]:
    """Return the names of all shipped programs, sorted: what `load` takes."""
    found = (entry.name for entry in _FOLDER.iterdir())
    return tuple(sorted(name.removesuffix(_END) for name in found if name.endswith(_END)))


def text(name: str) -> str:
    """Return a shipped program as it is written.

    Raises
    ------
    UsageError
        ``lay-rule``: there is none of this name.
    """
    if name not in names():
        near = get_close_matches(name, names(), n=1)
        raise UsageError(
            f"ckptd ships no layout or space named {name}",
            kind="lay-rule",
            wanted=", ".join(names()),
            hint=f"did you mean {near[0]}?" if near else "define it in the program",
        )
    return (_FOLDER / f"{name}{_END}").read_text(encoding="utf-8")


@cache
def load(name: str) -> File:
    """Return a shipped program.

    A layout's program holds the layout, the meshes that it stands on by itself, and a ``use`` of
    the space that it is of, which is a shipped program too.

    Parameters
    ----------
    name
        One of `names`.

    Raises
    ------
    UsageError
        ``lay-rule``: there is none of this name.
    """
    return parse(text(name), f"{name}{_END}")
