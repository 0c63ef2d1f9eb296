"""``ckptd verify``: options, findings as printed, exit codes.

In it: how many findings are shown.
"""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from ckptd.base.signatures import read_public
from ckptd.checkpoint.cli.address import CheckpointAddress, Where, held, opened
from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.load.witnesses import VerifyFinding, VerifyReport
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.tools.verify import check_records
from ckptd.checkpoint.tools.verify import verify as verify_one
from ckptd.cli.output import Document, Json, Reply, counted, flag, print_rows, progress_bar, shorten
from ckptd.errors import CorruptError, RefusedError, StoreError, UsageError, size_text
from ckptd.store.base import TrustSpec, wrap

_MOST_SHOWN = 100
_DETAIL_WIDTH = 100
_UNREAD = "unreadable-format"
"""Kind of a tensor that cannot be checked here, which does not make the rest bad."""
_NOT_CORRUPT = frozenset({"permission", "no-space", "store", "store-transient", "stalled"})
"""Kinds that tell of a store that failed, and not of bytes that are wrong."""


class VerifyDocument(Document, frozen=True, kw_only=True, tag="verify"):
    """The document that ``ckptd verify --json`` prints.

    Attributes
    ----------
    root
        URL.
    ok
        Nothing is wrong with any of them.
    checkpoints
        One report each, oldest first: step, generation, deep (data was read), files, tensors,
        chunks, data_bytes, read_bytes, absent (tensors that are incomplete on purpose), blind
        (tensors for which the witness can say nothing), findings, and more (the number of findings
        left out). A finding has kind, message, file, rank, tensor, chunk, where, wanted, found.
    records
        Findings about the root's own records: generations, and what was lost of them.
    """

    root: str
    ok: bool
    checkpoints: tuple[VerifyReport, ...]
    records: tuple[VerifyFinding, ...] = ()


def verify(
    where: Where,
    /,
    *,
    quick: Annotated[bool, flag("Check sizes and headers only; read no data.")] = False,
    all: Annotated[bool, flag("Check every checkpoint that counts.")] = False,
    key: Annotated[
        list[str] | None,
        Parameter(help="PEM of a public key that must have signed it; any one of several."),
    ] = None,
    json: Json = False,
) -> Reply:
    """Check every byte of a checkpoint; name tensor, chunk, file and rank of damage.

    The exit code is 3 when something is, and 5 when all that is wrong is that a foreign checkpoint
    has tensors of kinds that are not read.
    """
    address = CheckpointAddress.of(where)
    if all and address.step is not None:
        raise UsageError("--all checks every step", where=where, wanted="ROOT without @STEP")
    with opened(address.root, trust=() if key else None) as catalogue:
        findings = check_records(catalogue)
        names = catalogue.line() if all else [address.find(catalogue)]
        reports = []
        signed = catalogue
        if key:
            signed = Catalogue(wrap(catalogue.store, TrustSpec(read_public(key))))
        for name in names:
            reports.append(_verify(catalogue, name, signed, quick=quick))
            if not json:
                _show_report(reports[-1])
        document = VerifyDocument(
            root=catalogue.store.url,
            ok=not findings and not any(r.findings for r in reports),
            checkpoints=tuple(reports),
            records=findings,
        )
    return Reply(document, _show_rest, _exit_code(reports, findings))


def _verify(
    catalogue: Catalogue, name: CommitName, signed: Catalogue, *, quick: bool
) -> VerifyReport:
    try:
        with held(catalogue, name, "verify"):
            with progress_bar(f"step {name.step}") as bar:
                return verify_one(signed, name, deep=not quick, progress=bar)
    except (CorruptError, RefusedError) as error:
        # The commit record itself is damaged, so that no lease could be taken.
        return VerifyReport.failed(name, error, deep=not quick)


def _exit_code(reports: list[VerifyReport], records: tuple[VerifyFinding, ...]) -> int:
    kinds = {f.kind for r in reports for f in r.findings} | {f.kind for f in records}
    if not kinds:
        return 0
    if kinds == {_UNREAD}:
        return RefusedError.exit_code
    return StoreError.exit_code if kinds <= _NOT_CORRUPT | {_UNREAD} else CorruptError.exit_code


# -- for people ------------------------------------------------------------------------------------


def _show_rest(document: VerifyDocument) -> None:
    """Show what is not shown yet: reports come as checkpoints are verified."""
    if not document.checkpoints:
        print("no checkpoint counts here: nothing to check")
        return
    for finding in document.records:
        print(f"BAD: {finding.message} ({finding.where})")


def _show_report(report: VerifyReport) -> None:
    r = report
    title = f"step {r.step} of generation {r.generation}"
    count = len(r.findings) + r.more
    if not count:
        did = f"{size_text(r.read_bytes)} read" if r.deep else "sizes and headers only"
        print(f"{title}: good; {counted(r.tensors, 'tensor')} in {counted(r.files, 'file')}, {did}")
    else:
        unread = all(f.kind == _UNREAD for f in r.findings)
        verdict = "NOT ALL READ" if unread else "BAD"
        print(f"{title}: {verdict}, {counted(count, 'finding')}")
        _show_findings(report)
    if r.absent:
        print(f"  incomplete on purpose: {counted(len(r.absent), 'tensor')}")


def _show_findings(report: VerifyReport) -> None:
    print_rows(
        report.findings[:_MOST_SHOWN],
        {
            "KIND": lambda f: f.kind,
            "TENSOR": lambda f: f.tensor,
            "CHUNK": lambda f: f.chunk if f.chunk != f.tensor else None,
            ">RANK": lambda f: f.rank,
            "FILE": lambda f: f.file,
            "WHAT": lambda f: shorten(_detail(f), _DETAIL_WIDTH),
        },
    )
    left = len(report.findings) - _MOST_SHOWN + report.more
    if left > 0:
        print(f"... and {left} more; --json lists up to {len(report.findings)}")


def _detail(finding: VerifyFinding) -> str:
    text = finding.message
    if finding.where:
        text += f" ({finding.where})"
    if finding.wanted or finding.found:
        text += f": wanted {finding.wanted or 'nothing'}, found {finding.found or 'nothing'}"
    return text
