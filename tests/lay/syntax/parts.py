"""Readers of single parts of a program."""

from __future__ import annotations

from functools import partial

from ckptd.lay.syntax import grammar
from ckptd.lay.syntax.expressions import DIM, NAME, VALUE
from ckptd.lay.syntax.parser import read

parse_item = partial(read, grammar.ITEM)
parse_rule = partial(read, grammar.RULE)
parse_dim = partial(read, DIM)
parse_value = partial(read, VALUE)
parse_name = partial(read, NAME)
