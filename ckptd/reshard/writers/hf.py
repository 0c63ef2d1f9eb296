"""Writes Hugging Face model folders: whole tensors in few files, the index, tied weights."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import msgspec

from ckptd.base.grids.owners import single_owner
from ckptd.checkpoint.format.container import FileMap
from ckptd.errors import UsageError
from ckptd.reshard.execute import FileDraft
from ckptd.reshard.job import safetensors_draft
from ckptd.reshard.layouts import moment
from ckptd.reshard.reports import FolderNote
from ckptd.reshard.target import Assembled
from ckptd.reshard.verify import Expected, ExpectedValues
from ckptd.reshard.writers.folder import ChosenTensors, check_safetensors, whole_tensor
from ckptd.reshard.writers.states import plain_names
from ckptd.types import DTYPES

INDEX = "model.safetensors.index.json"
_OURS = re.compile(r"model(-[0-9]{5}-of-[0-9]{5})?\.safetensors(\.index\.json)?")


def model_file(number: int, count: int) -> str:
    """Return the name of a file of a model, as transformers calls it."""
    if count == 1:
        return "model.safetensors"
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def is_model_file(name: str) -> bool:
    """Tell whether a name is that of a file, or of the index, of a model."""
    return _OURS.fullmatch(name) is not None


def index_of(files: Mapping[str, str], total: int) -> bytes:
    """Return the index: the file of each tensor, and the bytes of all."""
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def tied_metadata(tied: Mapping[str, str]) -> dict[str, str]:
    """Return what the header of a file says: what transformers looks for, and tied names.

    Parameters
    ----------
    tied
        Names of tied tensors that are not written, and the name that each is written under, as
        ``safetensors.torch.save_model`` notes them.
    """
    return {**tied, "format": "pt"}


class HfPlace:
    """The parameters of a target as whole tensors in files of bounded size.

    Parameters
    ----------
    assembled, expected
        What is written, and what the source's witness wants to see.
    max_shard_bytes
        A file ends before it would hold more; a larger tensor has a file of its own.
    untie
        Write a tensor under each of its names, as a reader of the folder may ask for any.

    Raises
    ------
    UsageError
        ``lay-rule``: the layout cuts a tensor, or takes a state for a parameter. Or
        two tensors have one name, or safetensors lacks a type.
    """

    def __init__(
        self,
        assembled: Assembled,
        expected: Mapping[int, Expected],
        max_shard_bytes: int,
        *,
        untie: bool = True,
    ) -> None:
        chosen, plain = ChosenTensors(assembled, expected), plain_names(assembled)
        links = assembled.composed.links
        state = moment(link.tensor.name for link in links if not link.key[2])
        if state is not None:
            raise UsageError(
                "a Hugging Face folder holds only parameters, but this name is that of an "
                "optimizer state",
                kind="lay-rule",
                where=state,
                wanted="names that identify its parameter",
                hint="leave it out, -e 'from: NAME = drop'; or say with --from LAYOUT how"
                ' states are called: stored "model.{name}" states "optim.{name}.{state}"',
            )
        left_out: list[str] = [o.name for o in assembled.target.objects]
        file, held = 0, 0
        for number, tensor in enumerate(assembled.target.tensors):
            is_parameter = number < len(links) and not links[number].key[2]
            if not is_parameter and number not in assembled.scales:
                left_out += [tensor.name, *tensor.aliases]
                continue
            check_safetensors(tensor.dtype, tensor.name)
            grid = whole_tensor(assembled, number, "a Hugging Face folder")
            size = grid.piece(0).numel * DTYPES[tensor.dtype].itemsize
            aliases = tuple(map(plain, tensor.aliases))
            names = (plain(tensor.name), *(aliases if untie else ()))
            left_out += () if untie else tensor.aliases
            for name in names:
                if held and held + size > max_shard_bytes:
                    file, held = file + 1, 0
                held += size
                others = () if untie else aliases
                chosen.add(name, number, grid, single_owner(0), file, others)
        self.target = chosen.target(file + 1)
        self.expected: ExpectedValues = chosen.expected
        self.left_out: Sequence[str] = left_out
        self.simplified: Sequence[str] = ()
        self.notes: Sequence[FolderNote] = ()
        self.options = f"{max_shard_bytes} {untie}"
        self._tied: dict[int, dict[str, str]] = {}
        for entry in self.target.tensors:
            for alias in entry.aliases:
                self._tied.setdefault(entry.base, {})[alias] = entry.name

    def name(self, number: int) -> str:
        """Name of a file when all are complete."""
        return model_file(number, self.target.world)

    def draft(self, filemap: FileMap, number: int, key: str) -> FileDraft:
        """Return a file, its tensors by their own names."""
        entries = [
            (filemap.tensors[c.tensor].name, filemap.dtypes[c.tensor], c.piece.shape)
            for c in filemap.chunks(number)
        ]
        metadata = tied_metadata(self._tied.get(number, {}))
        return safetensors_draft(filemap, number, key, entries, metadata)

    def is_mine(self, name: str, beside: Collection[str]) -> bool:
        """Tell whether a file is of a model."""
        return is_model_file(name)

    def last(self) -> Sequence[tuple[str, bytes]]:
        """Return the index."""
        files = {t.name: self.name(t.base) for t in self.target.tensors}
        return [(INDEX, index_of(files, sum(self.target.sizes)))]
