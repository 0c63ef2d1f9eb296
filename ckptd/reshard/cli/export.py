"""``ckptd export``: options, prints and JSON of an export to Hugging Face safetensors."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from ckptd.checkpoint.cli.address import CheckpointAddress, Where, held, opened
from ckptd.checkpoint.load.reader import CkptdReader
from ckptd.cli.options import Dequantize, Section, size_of
from ckptd.cli.output import Document, Json, Reply, counted, flag, option, print_text, progress_bar
from ckptd.errors import UsageError, first_few, size_text
from ckptd.reshard.export import ExportedFile, Rename, plan_export, run_export

_SAID = 8


class ExportDocument(Document, frozen=True, kw_only=True, tag="export"):
    """The document that ``ckptd export --json`` prints.

    Attributes
    ----------
    root, step, generation
        The checkpoint.
    folder
        Where the files are.
    files
        Name, number of tensors, and bytes of each; the index is `model.safetensors.index.json`.
    tensors
        Number of tensors written.
    bytes
        Bytes of their values as written.
    tied
        With --no-untie: names that were not written again, and the tensor that each is.
    left_out
        Names of tensors that were not exported: optimizer state, other sections.
    objects
        Names of values, which an export does not have.
    """

    root: str
    step: int
    generation: int
    folder: str
    files: tuple[ExportedFile, ...]
    tensors: int
    bytes: int
    tied: dict[str, str]
    left_out: tuple[str, ...]
    objects: tuple[str, ...]


def export(
    where: Where,
    folder: Annotated[str, Parameter(help="Local folder to write to.")],
    /,
    *,
    section: Section = None,
    rename: Annotated[
        list[str] | None,
        option("OLD=NEW, OLD a regular expression; may be repeated."),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "float64"] | None,
        option("Cast floating-point weights to this type."),
    ] = None,
    max_shard_size: Annotated[str, Parameter(help="Largest file: 5GB, 500MB, 2GiB.")] = "5GB",
    untie: Annotated[
        bool,
        Parameter(
            help="Write tied weights under each of their names, or once.", negative="--no-untie"
        ),
    ] = True,
    dequantize: Dequantize = False,
    force: Annotated[bool, flag("Replace the model in the folder.")] = False,
    json: Json = False,
) -> Reply:
    """Write weights as Hugging Face safetensors with an index.

    Memory stays small whatever the size of the model; no torch is needed. A section of a single dot
    is everything; none is the weights, if they are one section.
    """
    rules = [_rule(text) for text in rename or ()]
    most = size_of(max_shard_size, "--max-shard-size")
    address = CheckpointAddress.of(where)
    with opened(address.root) as catalogue:
        with held(catalogue, address.find(catalogue), "export") as commit:
            reader = CkptdReader(catalogue, commit)
            plan = plan_export(
                reader,
                section=section,
                rename=rules,
                dtype=dtype,
                max_shard_bytes=most,
                untie=untie,
                dequantize=dequantize,
            )
            with progress_bar("exporting") as bar:
                files = run_export(reader, plan, folder, force=force, progress=bar)
    items = [item for _, some in plan.files for item in some]
    document = ExportDocument(
        root=catalogue.store.url,
        step=commit.step,
        generation=commit.generation,
        folder=folder,
        files=tuple(files),
        tensors=len(items),
        bytes=plan.nbytes,
        tied={alias: item.name for item in items for alias in item.aliases},
        left_out=plan.left_out,
        objects=plan.objects,
    )
    return Reply(document, _show)


def _rule(text: str) -> Rename:
    old, equals, new = text.partition("=")
    if not equals or not old:
        raise UsageError(
            "invalid --rename",
            where="--rename",
            wanted="OLD=NEW, such as '^transformer\\.=model.'",
            found=text,
        )
    return old, new


def _show(document: ExportDocument) -> None:
    d = document
    print(
        f"exported step {d.step} (generation {d.generation}): {counted(d.tensors, 'tensor')},"
        f" {size_text(d.bytes)} in {counted(len(d.files), 'file')} and an index"
    )
    for file in d.files[:_SAID]:
        print(f"  {d.folder}/{file.name}  {size_text(file.bytes)}")
    if len(d.files) > _SAID:
        print(f"  ... {len(d.files)} files in all")
    for alias, kept in list(d.tied.items())[:_SAID]:
        print(f"  {alias} is tied to {kept}, which is written once")
    for names, what in ((d.left_out, "tensor"), (d.objects, "value")):
        if names:
            said = f"  left out: {counted(len(names), what)}: {first_few(names, _SAID)}"
            print_text(said, 4)
