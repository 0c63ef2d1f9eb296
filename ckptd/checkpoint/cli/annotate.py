"""``ckptd annotate``: metadata that is added after the save."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from ckptd.checkpoint.cli.address import CheckpointDocument, Where, needs_step, opened
from ckptd.checkpoint.cli.ls import metadata_text
from ckptd.checkpoint.format.codec import parse_json
from ckptd.cli.output import Json, Reply
from ckptd.errors import UsageError

_WIDTH = 100


class AnnotateDocument(CheckpointDocument, frozen=True, kw_only=True, tag="annotate"):
    """The document of ``ckptd annotate --json``: the checkpoint, and its metadata as it is now."""

    metadata: dict[str, Any]


def annotate(
    where: Where,
    /,
    *pairs: Annotated[str, Parameter(help="KEY=VALUE: a value is JSON, else text.")],
    json: Json = False,
) -> Reply:
    """Add metadata to a checkpoint that is saved already, as an evaluation does."""
    address, added = needs_step(where), dict(map(_pair, pairs))
    with opened(address.root) as catalogue:
        name = address.find(catalogue)
        catalogue.annotate(name, added)
        metadata = catalogue.annotated({name: catalogue.commit(name)})[name].metadata
        document = AnnotateDocument(
            root=catalogue.store.url, step=name.step, generation=name.generation, metadata=metadata
        )
    return Reply(document, lambda d: print(f"{name}: {metadata_text(d.metadata, _WIDTH)}"))


def _pair(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UsageError("not a key and a value", where=text, wanted="KEY=VALUE")
    try:
        return key, parse_json(value.encode())
    except ValueError:
        return key, value
