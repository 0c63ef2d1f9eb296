"""Name patterns with globs and indexes as regular expressions; how many globs.

A name of a rule can be read as text in which every index is one letter-like mark. So the same
expressions match names that were observed (``decoder.layers.3.weight``) and the names of rules
that a layout imports (``decoder.layers.{l}.weight``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from itertools import pairwise

from ckptd.base.grouping import by_key
from ckptd.errors import UsageError
from ckptd.lay.syntax.tree import Alternatives, Glob, Name, NameIndex, NamePart, Text, join

MAX_GLOBS = 8
MAX_DEEP = 2
"""Most globs of a name, and most ``**``: one more costs a factor of the name's length."""

_OPEN, _CLOSE, _STAR, _STARS = "\ue000", "\ue001", "\ue002", "\ue003"
_NUMBER = "(0|[1-9][0-9]{0,8})"
_ANY_INDEX = f"(?:{_OPEN}[^{_CLOSE}]*{_CLOSE}|[0-9]+)"
_NUMBERS = re.compile(f"[0-9{_OPEN}]+")
_MARKED = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")


@lru_cache(maxsize=4096)
def found_regex(name: Name) -> re.Pattern[str]:
    """Return what matches names that were found; a group for each index and glob, in order.

    Raises
    ------
    UsageError
        ``lay-rule``: globs stand where they cannot.
    """
    return re.compile(_regex(name, lambda _: _NUMBER), re.ASCII)


@lru_cache(maxsize=4096)
def rule_regex(name: Name) -> re.Pattern[str]:
    """Return what matches `encoded` names of rules; a group for each glob.

    An index matches the index of the same axis, however both are cut.

    Raises
    ------
    UsageError
        ``lay-rule``: globs stand where they cannot.
    """
    return re.compile(_regex(name, lambda i: f"{_OPEN}{re.escape(i.axis)}{_CLOSE}"))


@lru_cache(maxsize=4096)
def _covering(name: Name) -> re.Pattern[str]:
    return re.compile(_regex(name, lambda _: _ANY_INDEX), re.ASCII)


def covers(first: Name, later: Name) -> bool:
    """Whether all names that `later` can match are matched by `first`.

    Sound and nearly complete: it can miss a cover that only several globs together make.
    """
    return _covering(first).fullmatch(encoded(later)) is not None


@lru_cache(maxsize=4096)
def encoded(name: Name) -> str:
    """Return a name as text, with a mark for each index and glob."""
    out = []
    for part in name.parts:
        match part:
            case Text():
                out.append(part.text)
            case NameIndex():
                out.append(f"{_OPEN}{part.axis}{_CLOSE}")
            case Glob():
                out.append(_STARS if part.deep else _STAR)
            case Alternatives():
                out.append("{" + ",".join(part.texts) + "}")
    return "".join(out)


class Lookup:
    """Finds, among many names, those that may have a name in common with another one.

    Names are compared by what stands between their numbers, then by the numbers that both of them
    state: rules that differ in a number only, such as those of a list of experts, never meet. It
    may find too many, and never too few. Names with globs are always found.
    """

    def __init__(self) -> None:
        self._globs: list[int] = []
        # By the text between the numbers, then by which numbers are stated.
        self._groups: dict[str, dict[tuple[int, ...], _Group]] = {}

    def add(self, number: int, name: Name) -> None:
        """Add a name, to be found by its number."""
        if any(isinstance(p, Glob) for p in name.parts):
            self._globs.append(number)
            return
        shape, stated = _apart(name)
        group = self._groups.setdefault(shape, {}).setdefault(tuple(stated), _Group())
        group.add(number, stated)

    def find(self, name: Name | str) -> list[int]:
        """Return the numbers of the names that may have a name in common with one, in order.

        One with globs is compared with those that have globs, too, as no other can hold it whole.
        """
        shape, stated = _apart(name)
        found = list(self._globs)
        for places, group in self._groups.get(shape, {}).items():
            common = tuple(k for k in places if k in stated)
            found += group.at(common).get(tuple(stated[k] for k in common), ())
        return sorted(found)


class _Group:
    """Names that state the same numbers; by those of some places, as far as it was asked."""

    def __init__(self) -> None:
        self._names: list[tuple[int, dict[int, str]]] = []
        self._at: dict[tuple[int, ...], dict[tuple[str, ...], list[int]]] = {}

    def add(self, number: int, stated: dict[int, str]) -> None:
        self._names.append((number, stated))
        for places, found in self._at.items():
            found.setdefault(tuple(stated[k] for k in places), []).append(number)

    def at(self, places: tuple[int, ...]) -> dict[tuple[str, ...], list[int]]:
        if places not in self._at:
            self._at[places] = by_key((tuple(s[k] for k in places), n) for n, s in self._names)
        return self._at[places]


def _apart(name: Name | str) -> tuple[str, dict[int, str]]:
    """Return a name's text with 0 for each number, and the numbers that it states, by place."""
    parts = (Text(name),) if isinstance(name, str) else name.parts
    text = "".join(p.text if isinstance(p, Text) else _OPEN for p in parts)
    numbers = enumerate(_NUMBERS.findall(text))
    return _NUMBERS.sub("0", text), {k: n for k, n in numbers if _OPEN not in n}


def filled(name: Name, texts: Sequence[str], indexes: Collection[NameIndex] = ()) -> Name:
    """Return a name with globs replaced.

    Parameters
    ----------
    name
        A name whose expression has matched.
    texts
        What its globs matched, in order.
    indexes
        Those that the marks in `texts` represent.
    """
    by_axis = {i.axis: i for i in indexes}
    left = list(texts)
    out: list[NamePart] = []
    glued = False
    for part in name.parts:
        if isinstance(part, Glob):
            text = left.pop(0)
            out += _decoded(text, by_axis)
            glued = part.deep
            continue
        if isinstance(part, Text) and glued:
            part = Text(part.text[1:])
        glued = False
        out.append(part)
    return Name(join(out), at=name.at)


def _decoded(text: str, by_axis: dict[str, NameIndex]) -> list[NamePart]:
    """Return marked text as parts."""
    pieces = _MARKED.split(text)
    return [by_axis[p] if k % 2 else Text(p) for k, p in enumerate(pieces)]


def _regex(name: Name, index: Callable[[NameIndex], str]) -> str:
    """Return a name as an expression.

    What a ``*`` matches ends at the first place where what stands behind it matches, if another
    ``*`` follows: no later place could be better. So the time stays within the length of the name
    (squared by each ``**``), whatever the pattern is.
    """
    parts = name.parts
    globs = [k for k, p in enumerate(parts) if isinstance(p, Glob)]
    deep = [k for k in globs if parts[k] == Glob(deep=True)]
    if len(globs) > MAX_GLOBS or len(deep) > MAX_DEEP:
        raise _wrong(name, f"more than {MAX_GLOBS} globs in one name, or {MAX_DEEP} times '**'")
    out = [_plain(name, 0, globs[0] if globs else len(parts), index)]
    for k, end in pairwise([*globs, len(parts)]):
        behind = _plain(name, k + 1, end, index)
        if k in deep:
            out.append(_deep(name, k) + behind)
        elif end in globs and end not in deep:
            out.append(f"(?>([^.{_STARS}]*?){behind})")
        else:
            out.append(f"([^.{_STARS}]*?){behind}")
    return "".join(out)


def _plain(name: Name, start: int, stop: int, index: Callable[[NameIndex], str]) -> str:
    """Return the parts of a name between globs as an expression."""
    out = []
    for k in range(start, stop):
        match part := name.parts[k]:
            case Text():
                # A deep glob matches with the dot behind it, so that it can match nothing at all.
                after = k > 0 and name.parts[k - 1] == Glob(deep=True)
                out.append(re.escape(part.text[1:] if after else part.text))
            case NameIndex():
                out.append(index(part))
            case _:
                raise _wrong(name, "alternatives are expanded before names are matched")
    return "".join(out)


def _deep(name: Name, k: int) -> str:
    """Return the expression of ``**``, which represents whole components and their dots."""
    before = name.parts[k - 1] if k else Text(".")
    after = name.parts[k + 1] if k + 1 < len(name.parts) else None
    if not (isinstance(before, Text) and before.text.endswith(".")) or not (
        after is None or (isinstance(after, Text) and after.text.startswith("."))
    ):
        raise _wrong(name, "''**' matches whole components: write a dot next to it, or use '*''")
    return "(.+)" if after is None else r"((?:[^.]+\.)*)"


def _wrong(name: Name, message: str) -> UsageError:
    return UsageError(message, kind="lay-rule", where=f"{name.at.file}:{name.at.line}")
