"""Checkpoints of DeepSpeed: ZeRO stages 1, 2 and 3, and the universal form.

A rank of ZeRO holds parts of parameters end to end in flat buffers, group by group; the files of
the model say which parameters in which order. Stage 3 cuts each parameter over the ranks; stages 1
and 2 cut the whole buffer. Tensors are the 32-bit weights under the names of parameters, and their
states as ``optim.NAME.STATE``, counters of steps too; groups of the optimizer are values as torch
has them, ``optim.param_groups.0.lr``, whose ``params`` are names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptd.errors import CorruptError, MismatchError, RefusedError
from ckptd.format.names import MAX_STEP
from ckptd.layout.grid import strides_of
from ckptd.readers.base import Foreign, ForeignPiece, Listing, json_value, missing, step_of
from ckptd.readers.pickles import PickledTensor, counts, named_values
from ckptd.readers.torchfiles import TensorAt, load_torch
from ckptd.readers.zips import TorchZip
from ckptd.types import Box

__all__ = ["DeepSpeedReader"]

_LATEST = "latest"
_MODEL = re.compile(r"(?:zero_pp_rank_([0-9]+)_)?mp_rank_([0-9]+)_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_)?zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_optim_states\.pt")
_UNIVERSAL = "zero/"
_OPTIMIZER = "optimizer_state.pt"
_MOST_GROUPS = 4096
_SKIPPED = ("optimizer_state_dict", "module", "param_shapes", "optimizer", "buffer_names")


class DeepSpeedReader:
    """Reads what ``engine.save_checkpoint`` and ``ds_to_universal.py`` wrote."""

    name = "deepspeed"

    def recognise(self, names: Listing) -> int:
        """Return 100 for the folder of a tag, or the one above it."""
        if any(_MODEL.fullmatch(n) for n in names.names):
            return 100
        below = (names.inside(f) for f in names.folders if f.startswith("global_step"))
        return 100 if _LATEST in names.names and any(map(self.recognise, below)) else 0

    def open(self, names: Listing) -> Foreign:
        """Read the pickles of all files."""
        if not any(_MODEL.fullmatch(n) for n in names.names):
            names = _tagged(names)
        for name in names.names:
            if re.match(r"layer_[0-9]+.*model_(01-)?states\.pt|.*_expert_", name):
                raise RefusedError(
                    "pipelines and experts of DeepSpeed are not read",
                    kind="unreadable-format",
                    where=names.key(name),
                )
        models = {n: m for n in names.names if (m := _MODEL.fullmatch(n))}
        parallel = sorted({int(m[2]) for m in models.values()})
        if parallel != [0]:
            raise RefusedError(
                "tensor parallelism of DeepSpeed is not read",
                kind="unreadable-format",
                where=names.where,
                found=f"mp ranks {parallel[:8]}",
            )
        first = min(models)
        model = load_torch(names, first)
        objects, left_out = _objects(model.value, names.key(first))
        if _UNIVERSAL in names.names:
            pieces, optimizer = _universal(names, model, first)
        else:
            pieces, optimizer = _flat(names, model, first)
        if optimizer is not None:
            pieces += _steps(model.value, names, optimizer)
            _add_groups(objects, left_out, model.value, names, optimizer)
        steps = objects.get("global_steps")
        step = steps if type(steps) is int and 0 <= steps <= MAX_STEP else step_of(names)
        return Foreign(pieces, objects, left_out, step=step, has_sections=False)


def _tagged(names: Listing) -> Listing:
    tag = names.read(_LATEST, 4096).decode("utf-8", "replace").strip() + "/"
    if tag not in names.names:
        raise missing(names.key(tag), "the file 'latest' names a folder that is not there")
    return names.inside(tag)


def _objects(value: Any, where: str) -> tuple[dict[str, Any], list[str]]:
    objects: dict[str, Any] = {}
    left_out = []
    kept = {k: v for k, v in value.items() if k not in _SKIPPED} if isinstance(value, dict) else {}
    for name, leaf in named_values(kept, where):
        try:
            objects[name] = json_value(leaf)
        except MismatchError:
            left_out.append(name)
    return objects, left_out


# -- the universal form ----------------------------------------------------------------------------


def _universal(
    names: Listing, model: TorchZip, of_model: str
) -> tuple[list[ForeignPiece], _Optimizer | None]:
    zero = names.inside(_UNIVERSAL)
    groups = _groups(model.value, names) if "param_shapes" in model.value else []
    shapes = {name: shape for group in groups for name, shape in group.items()}
    whole: dict[str, ForeignPiece] = {}
    trained: set[str] = set()
    for folder in zero.folders:
        parameter = zero.inside(folder)
        for file in parameter.ending(".pt"):
            found = load_torch(parameter, file)
            value = found.value.get("param") if isinstance(found.value, dict) else found.value
            if not isinstance(value, PickledTensor):
                continue
            state, name = file.removesuffix(".pt"), folder.removesuffix("/")
            key, shape = parameter.key(file), shapes.get(name, value.shape)
            if value.shape and value.shape != shape:
                # Stage 3 leaves them flat.
                if value.strides != (1,) or value.shape[0] != math.prod(shape):
                    raise MismatchError(
                        "a file and the shapes of parameters disagree",
                        kind="bad-pieces",
                        where=key,
                        wanted=shape,
                        found=value.shape,
                    )
                strides = strides_of(shape)
                value = PickledTensor(value.storage, value.offset, shape, strides, value.dtype)
            if state != "fp32":
                trained.add(name)
                name = f"optim.{name}.{state}"
            at, box = TensorAt(found, value, key), Box.whole(value.shape)
            whole[name] = ForeignPiece(name, value.dtype, value.shape, box, key, at)
    # A tied weight has a folder of its own at stages 1 and 2, with values of a narrower type.
    for name, aliases in _tied(model.value, trained, names.where).items():
        whole |= {alias: replace(whole[name], name=alias) for alias in aliases if name in whole}
    # What has no folder is where the ranks left it.
    rest = (*_weights(names.key(of_model), model, whole), *_frozen(names, model, of_model))
    pieces = [*whole.values(), *(p for p in rest if p.name not in whole)]
    optimizer = None
    if _OPTIMIZER in zero.names:
        optimizer = _Optimizer.of(load_torch(zero, _OPTIMIZER), zero.key(_OPTIMIZER))
    return pieces, optimizer


# -- the optimizer ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Optimizer:
    """States and groups of torch's optimizer in a file; a state is that of a group of shapes."""

    key: str
    found: TorchZip
    states: Sequence[Any]
    groups: Sequence[Any]

    @classmethod
    def of(cls, found: TorchZip, key: str) -> _Optimizer:
        """Take it from the file of a rank, or the one of the universal form."""
        top = found.value if isinstance(found.value, dict) else {}
        state = top.get("optimizer_state_dict", top)
        for inner in ("base_optimizer_state", "optimizer_state_dict"):
            if isinstance(state, dict) and inner in state:
                state = state[inner]
        state = state if isinstance(state, dict) else {"state": state}
        states, groups = state.get("state"), state.get("param_groups")
        states = list(states.values()) if isinstance(states, dict) else states
        return cls(
            key,
            found,
            states if isinstance(states, list) else (),
            groups if isinstance(groups, list) else (),
        )


def _steps(value: Any, names: Listing, optimizer: _Optimizer) -> Iterator[ForeignPiece]:
    """Yield the counter of steps of each parameter, which a group of shapes shares."""
    for group, state in zip(_groups(value, names), optimizer.states, strict=False):
        step = state.get("step") if isinstance(state, dict) else None
        if not isinstance(step, PickledTensor) or step.shape:
            continue
        for name in group:
            at = TensorAt(optimizer.found, step, f"{optimizer.key}: step")
            box = Box.whole(())
            yield ForeignPiece(f"optim.{name}.step", step.dtype, (), box, optimizer.key, at)


def _add_groups(
    objects: dict[str, Any],
    left_out: list[str],
    value: Any,
    names: Listing,
    optimizer: _Optimizer,
) -> None:
    """Add the settings of each group as torch's state has them, and names of its parameters."""
    shapes = _groups(value, names)
    for number, group in enumerate(optimizer.groups):
        held = group.get("params") if isinstance(group, dict) else None
        if not isinstance(held, list) or not all(
            type(i) is int and 0 <= i < len(shapes) for i in held
        ):
            left_out.append(f"optim.param_groups.{number}")
            continue
        params = sorted({name for i in held for name in shapes[i]})
        for key, one in {**group, "params": params}.items():
            name = f"optim.param_groups.{number}.{key}"
            try:
                objects[name] = json_value(one)
            except MismatchError:
                left_out.append(name)


# -- flat buffers ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rank:
    """The optimizer's file of a rank: buffers by state (empty: the weights), one a group."""

    rank: int
    key: str
    found: TorchZip
    stage: int
    world: int
    buffers: Mapping[str, Sequence[PickledTensor]]


def _flat(
    names: Listing, model: TorchZip, of_model: str
) -> tuple[list[ForeignPiece], _Optimizer | None]:
    groups = _groups(model.value, names)
    files = {int(m[1]): n for n in names.names if (m := _OPTIM.fullmatch(n))}
    if not files:
        return list(_weights(names.key(of_model), model, ())), None
    ranks = [_rank(names, rank, file) for rank, file in sorted(files.items())]
    for r in ranks:
        if r.world != len(ranks) or r.rank >= r.world or r.stage != ranks[0].stage:
            raise CorruptError(
                "files of ranks are missing, or of another number of ranks",
                kind="missing-file",
                where=names.where,
                wanted=f"{r.world} ranks, as {r.key} says",
                found=f"{len(ranks)} files",
            )
    trained = {name for group in groups for name in group}
    tied = _tied(model.value, trained, names.where)
    aliases = {one for further in tied.values() for one in further}
    pieces = list(_weights(names.key(of_model), model, trained | aliases))
    pieces += _frozen(names, model, of_model)
    shares = [] if ranks[0].stage == 3 else _shares(groups, ranks)
    for r in ranks:
        for state, buffers in r.buffers.items():
            cut = _each(groups, buffers, r) if r.stage == 3 else _whole(groups, buffers, r, shares)
            for name, shape, buffer, low, high, first in cut:
                stored = PickledTensor(
                    buffer.storage, buffer.offset + first, (high - low,), (1,), buffer.dtype
                )
                at = TensorAt(r.found, stored, f"{r.key}: {name}")
                box, dtype = Box.whole(shape), buffer.dtype
                for one in (name, *tied.get(name, ())) if not state else (name,):
                    full = f"optim.{one}.{state}" if state else one
                    pieces.append(ForeignPiece(full, dtype, shape, box, r.key, at, (low, high)))
    return pieces, _Optimizer.of(ranks[0].found, ranks[0].key)


_Groups = Sequence[Mapping[str, tuple[int, ...]]]
_Part = tuple[str, tuple[int, ...], PickledTensor, int, int, int]
"""Name, shape, buffer, range of the parameter's elements, where it begins in the buffer."""


def _each(groups: _Groups, buffers: Sequence[PickledTensor], r: _Rank) -> Iterator[_Part]:
    """Stage 3: each rank has the same share of each parameter, rounded up.

    Buffers of sub groups follow each other; a share may lie in two of them.
    """
    left, at = list(buffers), 0
    for name, shape in (item for group in groups for item in group.items()):
        n = math.prod(shape)
        share = -(-n // r.world)
        low, end = min(r.rank * share, n), min((r.rank + 1) * share, n)
        skip = share - (end - low)
        while low < end or skip:
            if not left:
                raise _short(r, name)
            room = left[0].shape[0] - at
            if not room:
                left, at = left[1:], 0
                continue
            take = min(room, end - low or skip)
            if low < end:
                yield name, shape, left[0], low, low + take, at
                low += take
            else:
                skip -= take
            at += take


def _shares(groups: _Groups, ranks: Sequence[_Rank]) -> list[int]:
    """Return how much of each group a rank has: the last ones may have left their padding out."""
    for r in ranks:
        if len(groups) != len(r.buffers[""]):
            raise _short(r, f"{len(r.buffers[''])} buffers for {len(groups)} groups")
    return [max(r.buffers[""][g].shape[0] for r in ranks) for g in range(len(groups))]


def _whole(
    groups: _Groups, buffers: Sequence[PickledTensor], r: _Rank, shares: Sequence[int]
) -> Iterator[_Part]:
    """Stages 1 and 2: parameters of a group end to end, padded, and cut evenly over the ranks."""
    for group, share, buffer in zip(groups, shares, buffers, strict=True):
        begin, at = r.rank * share, 0
        for name, shape in group.items():
            n = math.prod(shape)
            low, high = max(at, begin), min(at + n, begin + share)
            if high > low:
                if high - begin > buffer.shape[0]:
                    raise _short(r, name)
                yield name, shape, buffer, low - at, high - at, low - begin
            at += n


def _short(r: _Rank, name: str) -> CorruptError:
    return CorruptError(
        "the buffers of a rank and the shapes of parameters disagree",
        kind="bad-size",
        where=f"{r.key}: {name}"[:200],
    )


def _groups(value: Any, names: Listing) -> list[dict[str, tuple[int, ...]]]:
    """Return the shapes of parameters by name, group by group."""
    try:
        shapes = value["param_shapes"]
        groups = [dict(g) for g in (shapes if isinstance(shapes, list) else [shapes])]
        out = [{k: counts(v) for k, v in g.items()} for g in groups]
        if not all(type(k) is str for g in out for k in g):
            raise ValueError("a parameter without a name")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(
            "a model's file does not say the shapes of its parameters",
            kind="bad-pickle",
            where=names.where,
            found=f"{type(error).__name__}: {error}"[:200],
        ) from None
    return out


def _rank(names: Listing, rank: int, file: str) -> _Rank:
    found, key = load_torch(names, file), names.key(file)
    try:
        state = found.value["optimizer_state_dict"]
        stage = state["zero_stage"]
        stage = int(stage if type(stage) is int else stage.args[0])
        world = state["partition_count"]
        (world,) = counts([world if type(world) is int else max(counts(world))])
        if stage == 3:
            weights = state["fp32_flat_groups"]
            base = state["optimizer_state_dict"]["state"]
        else:
            weights = state["single_partition_of_fp32_groups"]
            base = state["base_optimizer_state"]
            base = base["state"] if isinstance(base, dict) else base
        states = base.values() if isinstance(base, dict) else base
        buffers: dict[str, list[Any]] = {"": list(weights)}
        for group in list(states)[:_MOST_GROUPS]:
            for name, buffer in group.items():
                if isinstance(buffer, PickledTensor) and len(buffer.shape) == 1:
                    buffers.setdefault(str(name), []).append(buffer)
        every = [b for some in buffers.values() for b in some]
        if not all(isinstance(b, PickledTensor) and b.strides == (1,) for b in every):
            raise ValueError("a buffer that is not flat")
        if any(len(some) != len(weights) for some in buffers.values()):
            raise ValueError("states and weights have different numbers of buffers")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CorruptError(
            "not the optimizer's file of a rank of ZeRO",
            kind="bad-pickle",
            where=key,
            found=f"{type(error).__name__}: {error}"[:200],
        ) from None
    return _Rank(rank, key, found, stage, world, buffers)


def _weights(key: str, model: TorchZip, trained: Collection[str]) -> Iterator[ForeignPiece]:
    """Yield what only the model's file holds: buffers, weights that are not trained.

    Those that are trained are there too at stages 1 and 2, under all of their names, and of a
    narrower type.
    """
    for name, value in named_values(model.value.get("module") or {}, key):
        if isinstance(value, PickledTensor) and name not in trained and value.shape != (0,):
            at = TensorAt(model, value, f"{key}: {name}")
            yield ForeignPiece(name, value.dtype, value.shape, Box.whole(value.shape), key, at)


def _frozen(names: Listing, model: TorchZip, first: str) -> Iterator[ForeignPiece]:
    """Yield the shares of parameters that stage 3 cuts and nobody trains."""
    files = {int(m[1]): n for n in names.names if (m := _MODEL.fullmatch(n)) and m[1]}
    for rank, file in sorted(files.items()):
        found = model if file == first else load_torch(names, file)
        key = names.key(file)
        fragments = _table(found.value, "frozen_param_fragments", key)
        frozen = _table(found.value, "frozen_param_shapes", key)
        shapes = _groups({"param_shapes": frozen}, names)[0]
        for name, shape in shapes.items():
            part, n = fragments.get(name), math.prod(shape)
            share = -(-n // len(files))
            low, high = min(rank * share, n), min((rank + 1) * share, n)
            flat = isinstance(part, PickledTensor) and part.strides == (1,)
            if not isinstance(part, PickledTensor) or not flat or part.shape != (share,):
                raise MismatchError(
                    "a rank's share of a frozen parameter is not there",
                    kind="bad-pieces",
                    where=f"{key}: {name}",
                )
            part = PickledTensor(part.storage, part.offset, (high - low,), (1,), part.dtype)
            at, box = TensorAt(found, part, f"{key}: {name}"), Box.whole(shape)
            yield ForeignPiece(name, part.dtype, shape, box, key, at, (low, high))


def _tied(value: Any, trained: Collection[str], where: str) -> dict[str, list[str]]:
    """Return the further names of parameters that modules share."""
    out: dict[str, list[str]] = {}
    shared = value.get("shared_params") or {}
    pairs = list(shared.items()) if isinstance(shared, dict) else shared
    for pair in pairs if isinstance(pairs, list) else (pairs,):
        if not isinstance(pair, list | tuple) or [type(n) for n in pair] != [str, str]:
            raise _no_table("shared_params", where)
        alias, name = pair
        if name in trained and alias not in trained:
            out.setdefault(name, []).append(alias)
    return out


def _table(value: Any, name: str, where: str) -> Mapping[Any, Any]:
    """Return a table of a model's file; empty where there is none."""
    found = value.get(name) if isinstance(value, dict) else value
    if not isinstance(found, dict | None):
        raise _no_table(name, where)
    return found or {}


def _no_table(name: str, where: str) -> CorruptError:
    return CorruptError(
        "a value of a model's file is no table of names",
        kind="bad-pickle",
        where=f"{where}: {name}",
    )
