"""Signatures of msgspec's structs, which Griffe does not know."""

from __future__ import annotations

from typing import Any

import griffe


class Structs(griffe.Extension):
    """Gives a class below `msgspec.Struct` the `__init__` that msgspec makes."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Add the parameters of a struct: its annotated attributes."""
        if "msgspec.Struct" not in map(str, cls.bases) or "__init__" in cls.members:
            return
        kinds = griffe.ParameterKind
        only = str(cls.keywords.get("kw_only")) == "True"
        fields = [
            griffe.Parameter(
                name,
                annotation=field.annotation,
                kind=kinds.keyword_only if only else kinds.positional_or_keyword,
                default=field.value,
            )
            for name, field in cls.attributes.items()
            if field.annotation is not None and "instance-attribute" in field.labels
        ]
        own = griffe.Parameter("self", kind=kinds.positional_or_keyword)
        init = griffe.Function(
            "__init__", parameters=griffe.Parameters(own, *fields), returns="None"
        )
        cls.set_member("__init__", init)
