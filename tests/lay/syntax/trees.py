"""Random syntax trees: every form, every kind of word, names with any letters."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from ckptd.lay.syntax import tree as t
from ckptd.lay.syntax.pieces import MAX_NUMBER

Strategy = st.SearchStrategy[Any]

# Words that begin something else somewhere, to find where the grammar would take them for it.
KEYWORDS = """
    same any avg sum cast q affine alias drop on follow rows use default flat pipe obj files stored
    states let mesh space layout reshard size order start end of each group bucket last ceil even
    bal module reverse params scalar via budget change inf
"""

WORDS = st.one_of(
    st.sampled_from(["a", "b", "kv", "rep", "hd", "h", "tp", "dp", "x1", "A_b"]),
    st.sampled_from(KEYWORDS.split()),
)
DOTTED = st.one_of(WORDS, st.sampled_from(["hf.llama", "a.b.c", "zero1", "m.1x"]))
ANY_TEXT = st.text(max_size=6)
NUMBERS = st.one_of(
    st.integers(0, 300), st.sampled_from([10**6, 40 * 10**6, 10**9, 1234567, MAX_NUMBER])
)
FLOATS = st.one_of(
    st.sampled_from([0.0, 1.0, -1.0, 0.1, 1e300, float("inf"), float("-inf")]),
    st.floats(allow_nan=False),
)
TAGS = st.one_of(WORDS, st.sampled_from(["pad", "lcm", "_"]))


def tuples(items: Strategy, low: int = 0, high: int = 3) -> Strategy:
    return st.lists(items, min_size=low, max_size=high).map(tuple)


# --- values, dimensions, names ------------------------------------------------------------------

VALUES: Strategy = st.recursive(
    st.one_of(NUMBERS.map(t.Number), WORDS.map(t.Size)),
    lambda below: st.builds(
        t.Arithmetic, st.sampled_from(["*", "+", "-", "//", "lcm", "min", "max"]), below, below
    ),
    max_leaves=5,
)
HOWS: Strategy = st.one_of(
    st.just(t.EVEN),
    st.builds(t.Even, st.sampled_from(["even", "ceil", "bal"]), VALUES),
    st.builds(t.Widths, tuples(NUMBERS, 1)),
)
DIMS: Strategy = st.recursive(
    st.one_of(
        WORDS.map(t.Atom),
        WORDS.map(t.Atom),
        st.sampled_from([t.One(), t.Wild(), t.Rest()]),
    ),
    lambda below: st.one_of(
        st.builds(
            t.Split, below, WORDS, HOWS | st.builds(t.Assigned, tuples(st.integers(0, 9), 1))
        ),
        st.builds(t.Product, tuples(below, 1)),
        st.builds(t.Sum, tuples(st.builds(t.Branch, TAGS, below), 1)),
        st.builds(t.Pad, below, VALUES, FLOATS),
    ),
    max_leaves=6,
)

TEXTS = st.one_of(
    st.sampled_from(["a", ".", "layers.", ".weight", "L", "0.", "x_y"]), st.text(max_size=4)
)
INDEXES = st.one_of(
    st.builds(t.NameIndex, WORDS, tuples(st.tuples(WORDS, HOWS), 0, 2), st.booleans()),
    st.integers(0, 12).map(lambda i: t.NameIndex(str(i))),
)
PARTS = st.one_of(
    TEXTS.map(t.Text),
    TEXTS.map(t.Text),
    st.booleans().map(t.Glob),
    INDEXES,
    st.builds(t.Alternatives, tuples(TEXTS, 2)),
)


def _apart(parts: tuple[t.NamePart, ...]) -> t.Name:
    """Two globs side by side are no name: a dot goes between them."""
    out: list[t.NamePart] = []
    for part in t.join(parts):
        if out and isinstance(part, t.Glob) and isinstance(out[-1], t.Glob):
            out.append(t.Text("."))
        out.append(part)
    return t.Name(tuple(out) or (t.Text("x"),))


NAMES: Strategy = tuples(PARTS, 1, 5).map(_apart)

# --- statements ---------------------------------------------------------------------------------

COMPUTED: Strategy = VALUES.filter(lambda value: not isinstance(value, t.Number))
RANGES: Strategy = st.one_of(
    NUMBERS.map(lambda k: t.Range(k, k)),
    st.builds(
        lambda a, b, step: t.Range(min(a, b), max(a, b), step), NUMBERS, NUMBERS, st.integers(1, 9)
    ),
    st.builds(lambda k, step: t.Range(k, None, step), NUMBERS, st.integers(1, 9)),
    st.builds(t.Range, COMPUTED, st.one_of(st.none(), NUMBERS, COMPUTED), st.integers(1, 9)),
)
CONDITIONS: Strategy = st.builds(t.For, WORDS, tuples(RANGES, 1))

MODIFIERS: Strategy = st.one_of(
    CONDITIONS,
    st.sampled_from([t.Replicas("same"), t.Replicas("any")]),
    st.builds(t.Average, st.sampled_from(["avg", "sum"]), WORDS),
    WORDS.map(t.Cast),
    st.builds(
        t.Quantized,
        WORDS,
        tuples(NUMBERS, 1),
        NAMES,
        st.one_of(st.just(""), WORDS),
        st.one_of(st.none(), NAMES),
    ),
    st.builds(t.Affine, FLOATS, FLOATS),
    st.builds(t.On, WORDS, st.one_of(NUMBERS, st.just("last"))),
    NAMES.map(t.FollowRows),
    st.sampled_from([t.Alias(), t.Drop()]),
)
MODS = tuples(MODIFIERS, 0, 2)
SHAPES = tuples(DIMS)
DROPS = st.builds(t.Rule, NAMES, st.none(), st.just(()), MODS.map(lambda more: (t.Drop(), *more)))
ALIASES = st.builds(t.Rule, NAMES, NAMES, SHAPES, MODS.map(lambda more: (t.Alias(), *more)))
RULES: Strategy = st.one_of(st.builds(t.Rule, NAMES, NAMES, SHAPES, MODS), ALIASES, DROPS)
GROUPS: Strategy = st.one_of(
    st.just(t.FlatGroup("each")),
    NAMES.map(lambda name: t.FlatGroup("group", name)),
    NUMBERS.map(lambda size: t.FlatGroup("bucket", elements=size)),
    st.builds(t.FlatGroup, st.just("parts"), st.one_of(st.none(), NAMES), NUMBERS),
)
FLATS: Strategy = st.builds(
    t.Flat,
    GROUPS,
    st.tuples(WORDS, HOWS),
    st.one_of(st.just(("*",)), tuples(WORDS, 1)),
    st.sampled_from(["module", "reverse", "robin"]),
    VALUES,
    VALUES,
    MODS,
    st.one_of(st.none(), NAMES),
)
OBJECT_NAMES = st.one_of(DOTTED, ANY_TEXT)
OBJECTS: Strategy = st.one_of(
    st.builds(t.Object, OBJECT_NAMES, tuples(WORDS), st.sampled_from(["error", "drop", "reseed"])),
    st.builds(t.Object, OBJECT_NAMES, tuples(WORDS), st.just("reduce"), WORDS),
)
STATES: Strategy = st.builds(t.FollowedState, WORDS, st.one_of(DOTTED, ANY_TEXT))
STATEMENTS: Strategy = st.one_of(
    RULES,
    RULES,
    DOTTED.map(t.Use),
    st.builds(t.Default, SHAPES, MODS),
    FLATS,
    st.builds(t.Pipe, WORDS, tuples(WORDS, 1), ANY_TEXT),
    OBJECTS,
    NAMES.map(t.Files),
    st.builds(t.Stored, st.one_of(st.just("{name}"), ANY_TEXT), ANY_TEXT, tuples(STATES)),
    st.builds(t.Stored, st.just("{name}"), ANY_TEXT, st.just(()), NAMES),
)

# --- programs -----------------------------------------------------------------------------------

MESH_AXES: Strategy = st.recursive(
    st.builds(t.MeshAxis, WORDS, NUMBERS),
    lambda below: st.builds(t.MeshAxis, WORDS, NUMBERS, tuples(below, 1)),
    max_leaves=3,
)
MESHES: Strategy = st.builds(t.Mesh, WORDS, tuples(MESH_AXES, 1), tuples(MESH_AXES))
LETS: Strategy = st.builds(t.Let, WORDS, st.one_of(DIMS, VALUES, NAMES))
SCALARS: Strategy = st.builds(t.Scalar, WORDS, st.sampled_from(["param", "group", "global"]))
FAMILIES: Strategy = st.builds(t.SpaceTensor, NAMES, tuples(WORDS), tuples(CONDITIONS, 0, 2))
SPACES: Strategy = st.builds(
    t.Space, DOTTED, tuples(FAMILIES), tuples(STATES), tuples(SCALARS, 0, 2), tuples(LETS, 0, 2)
)
LAYOUTS: Strategy = st.builds(
    t.Layout, DOTTED, st.one_of(st.just(""), DOTTED), tuples(WORDS, 0, 2), tuples(STATEMENTS)
)
RESHARDS: Strategy = st.builds(
    t.Reshard,
    DOTTED,
    DOTTED,
    st.sampled_from(["disk", "memory", "peer"]),
    st.one_of(st.none(), NUMBERS, NUMBERS.map(lambda x: x % 1000 << 30)),
)
ITEMS: Strategy = st.one_of(MESHES, LETS, SPACES, LAYOUTS, LAYOUTS, RESHARDS, DOTTED.map(t.Use))
FILES: Strategy = tuples(ITEMS, 0, 4).map(t.File)
