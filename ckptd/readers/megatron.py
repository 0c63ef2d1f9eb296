"""Reads Megatron-core's torch_dist: stacked layers, common state, optimizer buckets.

Names are Megatron's own, layers stacked (``decoder.layers.mlp.linear_fc1.weight`` of shape
``[layers, ...]``) or one by one; a layout program says what they are.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from ckptd.checkpoint.format.codec import decode, parse_json
from ckptd.errors import RefusedError
from ckptd.readers import base
from ckptd.readers.dcp import METADATA, read_items
from ckptd.readers.hints import megatron_args, megatron_hints, megatron_said, megatron_sizes
from ckptd.readers.pickles import named_values
from ckptd.readers.torchfiles import load_torch

_METADATA = "metadata.json"
_COMMON = "common.pt"
_RANK = re.compile(r"mp_rank_[0-9]{2,}(_[0-9]{3,})*/")
_WEIGHTS = ("model_optim_rng.pt", "model_rng.pt")
_MAX_BYTES = 1 << 20
_EXTRA = "._extra_state"
_BUCKET = re.compile(
    r"(?P<group>.*optimizer\.distributed\.dp_group_idx_[0-9]+)\.(?P<buffer>gbuf_idx_[0-9]+)"
    r"\.dtype_(?P<dtype>[^/]*)\.bucket_idx_(?P<number>[0-9]{1,6})\.(?P<state>\w+)"
)
_LENGTHS = ".per_bucket_numel/shard_0_1"
_EMBEDDING = "embedding.word_embeddings.weight"
_ATTENTION = "decoder.layers.self_attention.linear_"
_DOWN = "decoder.layers.mlp.linear_fc2.weight"


class MegatronReader:
    """Reads what ``megatron.core.dist_checkpointing.save`` wrote."""

    name = "megatron"

    def recognise(self, names: base.Listing) -> int:
        """Return 110 for its three files; more than dcp, whose folder it is as well.

        Not for two of them: other programs call their files ``metadata.json``, too.
        """
        if {METADATA, _METADATA, _COMMON} <= set(names.names):
            return 110
        return 90 if _legacy(names) else 0

    def open(self, names: base.Listing) -> base.Foreign:
        """Read both metadata files, and the common state."""
        folders = _legacy(names)
        if folders:
            raise RefusedError(
                "a legacy Megatron checkpoint (one folder per rank) needs a layout",
                kind="unreadable-format",
                where=names.where,
                wanted="torch_dist",
                found=", ".join(folders[:4]),
                hint=f"{_command(names, folders)}; or load and save it with "
                "--ckpt-convert-format torch_dist",
            )
        try:
            about = parse_json(names.read(_METADATA, _MAX_BYTES))
            backend = about["sharded_backend"]
        except (ValueError, KeyError, TypeError) as error:
            what = "invalid metadata of a Megatron checkpoint"
            raise base.damaged(what, names.key(_METADATA), error) from None
        if backend != "torch_dist":
            raise RefusedError(
                "unsupported format of a Megatron checkpoint",
                kind="unreadable-format",
                where=names.key(_METADATA),
                wanted="torch_dist",
                found=str(backend)[:80],
                hint="save with --ckpt-format torch_dist",
            )
        found = read_items(names, lambda name: _EXTRA not in name)
        values = base.KeptValues(found.objects, found.left_out)
        common = load_torch(names, _COMMON).value
        for name, value in named_values(common, names.key(_COMMON)):
            values.add(name, value)
        objects = values.objects()
        step = base.step_or(objects.get("iteration"), base.step_of(names))
        pieces = list(found.pieces)
        lay, sizes = megatron_hints({p.name: p.shape for p in pieces}, common)
        left_out = list(values.left_out)
        return base.Foreign(pieces, objects, left_out, step=step, lay=lay, sizes=sizes)


def open_buckets(names: base.Listing) -> base.Foreign | None:
    """Read the optimizer of ``dp_reshardable``: buckets, which only a layout gives names.

    They are called ``GROUP: gbuf_idx_0.0.exp_avg``: the ranks that have one part of the model, the
    buffer, the bucket's number in it, and the state. The objects are their lengths with what fills
    them up, by ``GROUP: gbuf_idx_0``; the sizes are those that the tensors of the model say.

    Returns
    -------
    Foreign | None
        None where the folder is no torch_dist with buckets.

    Raises
    ------
    CorruptError
        As `MegatronReader.open`;: the table of lengths is damaged.
    RefusedError
        kind ``unreadable-format``: there are several optimizers, or types in one buffer.
    """
    if not {METADATA, _METADATA, _COMMON} <= set(names.names):
        return None
    found = read_items(names, lambda name: name.endswith(_LENGTHS))
    pieces: list[base.ForeignPiece] = []
    shapes: dict[str, tuple[int, ...]] = {}
    types: dict[tuple[str, str], str] = {}
    for piece in found.pieces:
        shapes[piece.name] = piece.shape
        match = _BUCKET.fullmatch(piece.name)
        if match is None:
            continue
        group, buffer, number = match["group"], match["buffer"], int(match["number"])
        if not group.startswith("optimizer."):
            raise _not_one(names, "one optimizer", group)
        if types.setdefault((group, buffer), match["dtype"]) != match["dtype"]:
            raise _not_one(names, "one type in a buffer", piece.name)
        name = f"{group}: {buffer}.{number}.{match['state']}"
        pieces.append(replace(piece, name=name))
    if not pieces:
        return None
    objects = {
        f"{group}: {buffer}": _lengths(names, found.objects, group, buffer)
        for group, buffer in types
    }
    common = load_torch(names, _COMMON).value
    iteration = common.get("iteration") if isinstance(common, dict) else None
    step = base.step_or(iteration, found.step)
    sizes = _model_sizes(shapes, common)
    return base.Foreign(pieces, objects, step=step, sizes=sizes, has_sections=False)


def _not_one(names: base.Listing, wanted: str, found: str) -> RefusedError:
    return RefusedError(
        "a layout cannot read the buckets of this optimizer",
        kind="unreadable-format",
        where=names.key(METADATA),
        wanted=wanted,
        found=found[:200],
        hint="load it with Megatron, and save it with --dist-ckpt-optim-fully-reshardable",
    )


def _lengths(names: base.Listing, objects: Mapping[str, Any], group: str, buffer: str) -> list[int]:
    """Return how long the buckets of a buffer are with what fills them up."""
    number = int(buffer.rpartition("_")[2])
    try:
        # A shard of one; a table for each buffer, of the one type that it has.
        found = decode(objects[group + _LENGTHS])
        while len(found) == 1 and isinstance(found[0], list):
            found = found[0]
        (lengths,) = found[number].values()
        if not all(type(n) is int and 0 < n < 1 << 62 for n in lengths):
            raise ValueError("a length that is not a count")
        return list(lengths)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        what = "the optimizer does not record the length of its buckets"
        where = names.key(f"{METADATA}: {group}{_LENGTHS}")
        raise base.damaged(what, where, error) from None


def _model_sizes(shapes: Mapping[str, tuple[int, ...]], common: object) -> dict[str, int]:
    """Return the sizes of axes that the tensors of the model say, which lie beside the buckets."""
    sizes = dict(megatron_sizes(shapes.get(_EMBEDDING, ()), common))
    attention = [shapes.get(f"{_ATTENTION}{n}.weight", ()) for n in ("proj", "qkv")]
    down = shapes.get(_DOWN, ())
    if len(down) == 3:
        sizes |= {"l": down[0], "h": down[1], "f": down[2]}
    if all(len(shape) == 3 for shape in attention):
        queries, rows = attention[0][2], attention[1][1]
        keys = (rows - queries) // 2
        if keys > 0 and queries % keys == 0:
            sizes["rep"] = queries // keys
    return sizes


def _legacy(names: base.Listing) -> list[str]:
    """Return the folders of ranks of the form before torch_dist, if there are several."""
    folders = [n for n in names.folders if _RANK.fullmatch(n)]
    if len(folders) < 2 or METADATA in names.names:
        return []
    return folders if any(n in _WEIGHTS for n in names.inside(folders[0]).names) else []


def _command(names: base.Listing, folders: Sequence[str]) -> str:
    """Return the command that reads the legacy form, as far as names and arguments tell.

    Raises
    ------
    CorruptError
        There is no folder for one of the ranks.
    """
    places = [tuple(map(int, f.rstrip("/").split("_")[2:])) for f in folders]
    sizes = [max(numbers) + 1 for numbers in zip(*places, strict=False)]
    if math.prod(sizes) != len(places):
        whole = product(*map(range, sizes)) if math.prod(sizes) <= base.MAX_NAMES else ()
        gone = next((place for place in whole if place not in set(places)), sizes)
        raise base.missing(
            names.key(f"mp_rank_{'_'.join(map(str, gone))}/"), "copy those of all ranks"
        )
    inside = names.inside(folders[0])
    file = next(n for n in _WEIGHTS if n in inside.names)
    value = load_torch(inside, file).value
    if not isinstance(value, dict):
        value = {}
    if len(sizes) > 2 or megatron_args(value).get("num_experts") or "model0" in value:
        return "ckptd reshard --from LAYOUT, with a line 'files' in the layout"
    tp, pp = (*sizes, 1)[:2]
    axes = "_".join(("{tp:02}", "{pp:03}")[: len(sizes)])
    words = [f"from: mesh megatron_gpt = pp:{pp} dp:1 tp:{tp}"]
    words += [f"let {k} = {v}" for k, v in megatron_said(value).items()]
    words += [f'from: files "mp_rank_{axes}/{file}"', 'from: stored "model.{name}"']
    given = "".join(f" -e {shlex.quote(word)}" for word in words)
    return f"ckptd reshard {shlex.quote(names.where)} OUT --from megatron.gpt{given}"
