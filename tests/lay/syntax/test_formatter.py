"""The normal form keeps comments and blank lines, and is what it is brought to again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.errors import UsageError
from ckptd.lay.syntax import format_text, parse, show
from ckptd.lay.syntax.parser import scan
from ckptd.lay.syntax.tree import File
from tests.lay.syntax import trees

UGLY = """\

# what this is
mesh M=pp:2   tp : 4 # eight ranks


let kv=8;let hd=( two half )
space s{  # tensors
E[v h] nf[h]# two


   # a layer
L{l}.q[kv,hd h] .k[
   kv hd # inside
 h]
follow m=exp_avg,s
   # nothing more
}
# the layout
layout a on M{
x.{#l}=E[(a|b)]; y = E[h]
# end
}# done
reshard a->b

# bye
"""

NEAT = """\
# what this is
mesh M = pp:2 tp:4  # eight ranks

let kv = 8
let hd = (two half)

space s {  # tensors
  E[v h]
  nf[h]  # two

  # a layer
  L{l}.q[kv hd h]
  # inside
  L{l}.k[kv hd h]
  follow m=exp_avg, s
  # nothing more
}

# the layout
layout a on M {
  x.{#l} = E[(g:a|u:b)]
  y = E[h]
  # end
}  # done

reshard a -> b via disk

# bye
"""


def test_the_normal_form() -> None:
    ugly = UGLY.replace("(a|b)", "( g:a | u:b )")
    assert format_text(ugly) == NEAT
    assert format_text(NEAT) == NEAT


def test_what_is_no_program_is_not_formatted() -> None:
    with pytest.raises(UsageError, match=r"ugly\.lay:20"):
        format_text(UGLY, "ugly.lay")


@pytest.mark.parametrize(
    ("text", "neat"),
    [("", ""), ("\n\n", ""), ("# only", "# only\n"), ("use a\n\n\n\nuse b", "use a\n\nuse b\n")],
)
def test_small_programs(text: str, neat: str) -> None:
    assert format_text(text) == neat


COMMENTS = st.sampled_from(["# c", "#c ", "# {#l} \" '", "#", "# x = E[h]; }"])
BLANKS = st.sampled_from(["\n", "\n\n\n", " \t", "\n  "])


@given(trees.FILES, st.data())
def test_comments_anywhere_are_kept(tree: File, data: st.DataObject) -> None:
    """Comments go between the lines of a program and behind them."""
    out = []
    for line in show(tree).splitlines():
        if data.draw(st.booleans()):
            out += [data.draw(COMMENTS), data.draw(BLANKS)]
        tail = " " + data.draw(COMMENTS) if data.draw(st.booleans()) else ""
        out.append(line + tail)
    text = "\n".join(out)
    neat = format_text(text)
    assert parse(neat) == tree
    assert format_text(neat) == neat
    assert _comments(neat) == _comments(text)


def _comments(text: str) -> list[str]:
    found = scan(text)[1].comments
    return [found[at].rstrip() for at in sorted(found)]
