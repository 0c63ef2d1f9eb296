"""What the daemon calls groups, operations and call sites: by what agents told once."""

from __future__ import annotations

from ckptd.monitor.sheet import GroupInfo

__all__ = ["Names"]

_KINDS = 32
_PREFIX = "mesh_"
_KNOWN = {"default_pg": "world", "": "group"}


class Names:
    """Names by hash; where none was told, the hash in hexadecimal.

    Parameters
    ----------
    groups, texts
        What was told; both may grow while this is used.
    """

    def __init__(self, groups: dict[int, GroupInfo], texts: dict[int, str]) -> None:
        self.groups = groups
        self.texts = texts
        self._kinds: set[str] = set()

    def op(self, number: int) -> str:
        """Return the name of an operation."""
        return self.texts.get(number) or f"op {number:08x}"

    def group(self, number: int) -> str:
        """Return the name of a group."""
        info = self.groups.get(number)
        return (info.name if info else "") or f"{number:016x}"

    def site(self, number: int) -> str:
        """Return where a call was made; empty if that is not known."""
        return self.texts.get(number) or (f"{number:016x}" if number else "")

    def kind(self, number: int) -> str:
        """Return the kind of a group in one word, of which there are few: ``dp``, ``world``."""
        info = self.groups.get(number)
        return self.kind_word(info.kind if info else "")

    def kind_word(self, said: str) -> str:
        """Return the word for a kind as a program says it, such as ``mesh_dp``."""
        said = said.removeprefix(_PREFIX)
        word = _KNOWN.get(said, said)
        if word not in self._kinds:
            if len(self._kinds) >= _KINDS or not word.isprintable() or len(word) > 32:
                return "other"
            self._kinds.add(word)
        return word
