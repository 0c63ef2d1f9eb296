"""The normative page and the code say the same where a machine can tell."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ckptd.base import digest
from ckptd.base.grids import grid
from ckptd.checkpoint.format import codec, container, invariants, manifest, names, records, witness
from ckptd.checkpoint.format.invariants import check_coverage, check_files, check_manifest
from ckptd.checkpoint.format.manifest import decode_manifest
from ckptd.types import DTYPES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/spec/format-1.md").read_text()
HEADINGS = set(re.findall(r"^#{2,3} (\d+(?:\.\d+)?)\.? ", PAGE, re.MULTILINE))


def section(number: str) -> str:
    """The text of one section, its subsections included."""
    level = "##" if "." not in number else "###"
    start = re.search(rf"^{level} {re.escape(number)}\.? ", PAGE, re.MULTILINE)
    assert start
    end = re.search(rf"^#{{2,{len(level)}}} ", PAGE[start.end() :], re.MULTILINE)
    return PAGE[start.start() : start.end() + end.start() if end else None]


def test_the_example_is_a_good_manifest() -> None:
    text = section("12")
    raw = text.partition("```json\n")[2].partition("```")[0].encode()
    found = decode_manifest(raw, "manifest.json")
    filemap = check_manifest(found, "manifest.json", len(raw))
    check_files(found, filemap)
    assert check_coverage(found, filemap) == []
    assert set(json.loads(raw)) <= set(re.findall(r"`(\w+)`", section("3.1")))
    for number, ends in enumerate([(0, 24, 44, 49), (0, 24, 52, 59)]):
        chunks = filemap.chunks(number)
        assert [c.start for c in chunks] + [chunks[-1].end] == list(ends)
        for chunk in chunks:
            assert f"`{filemap.chunk_name(number, chunk)}`" in text


def test_dtypes() -> None:
    rows = re.findall(r"\| `(\w+)` \| (\d+) \| `(\w+)`(, bytes)? ", section("4.2"))
    listed = {name: (int(size), code, bool(raw)) for name, size, code, raw in rows}
    assert listed == {
        d.name: (d.itemsize, d.stored_code, d.safetensors is None) for d in DTYPES.values()
    }


def test_fields() -> None:
    for kind, number in (
        (manifest.Manifest, "3.1"),
        (manifest.FileEntry, "3.2"),
        (manifest.GridEntry, "3.3"),
        (manifest.TensorEntry, "3.5"),
        (manifest.ObjectEntry, "7"),
        (manifest.WitnessEntry, "8"),
        (manifest.MeshEntry, "3.1"),
        (records.RootMarker, "2.2"),
        (records.Generation, "2.2"),
        (records.Commit, "2.2"),
        (records.Lease, "2.2"),
        (records.Pin, "2.2"),
    ):
        text = section(number)
        missing = [f for f in kind.__struct_fields__ if f"`{f}`" not in text]
        assert not missing, f"{kind.__name__} in section {number}"


@pytest.mark.parametrize(
    ("number", "text", "value"),
    [
        ("1.3", "at most 1,024 characters", 1024),
        ("2.1", "999,999,999,999", names.MAX_STEP),
        ("2.1", "99,999,999", names.MAX_GENERATION),
        ("2.2", "1 MiB", records.MAX_RECORD_BYTES >> 20),
        ("2.2", "2^30", manifest.MAX_MANIFEST_BYTES),
        ("3", "at most 64 times", manifest.MAX_RATIO),
        ("3.6", "1 to 4,096", names.MAX_NAME_CHARS),
        ("3.6", "dimensions of a tensor | 64", invariants.MAX_DIMS),
        ("3.6", "2^63 - 1", grid.MAX_EXTENT),
        ("3.6", "below 2^62", invariants.MAX_BYTES),
        ("3.6", "1,048,576 + 64 for each", invariants.FREE_PIECES),
        ("3.6", "+ 64 for each", invariants.PIECES_PER_BYTE),
        ("3.6", "and 2^26", invariants.MAX_PIECES),
        ("3.6", "`metadata` as JSON | 262,144", invariants.MAX_METADATA_BYTES),
        ("3.6", "`lay` | 1,048,576", invariants.MAX_LAY_CHARS),
        ("4", "100,000,000", container.MAX_HEADER_BYTES),
        ("4", "multiple of 4,096", container.ALIGNMENT),
        ("5", "block size: 1,048,576", digest.BLOCK_BYTES),
        ("5", "at most 2^24", digest.MAX_CHUNKS),
        ("7.1", "at most 64 levels", codec.MAX_DEPTH),
        ("7.1", "at most 32 dimensions", codec.MAX_DIMS),
        ("8.2", "1024", witness.MAX_VALUES_PER_TENSOR),
        ("8.2", "1000000", witness.MAX_VALUES),
    ],
)
def test_numbers(number: str, text: str, value: int) -> None:
    assert text in section(number)
    said = [eval_power(x) for x in re.findall(r"\d[\d,]*(?:\^\d+)?(?: - 1)?", text)]
    assert value in said


def eval_power(text: str) -> int:
    base, _, rest = text.replace(",", "").partition("^")
    exponent, minus, _ = rest.partition(" - 1")
    return int(base) ** int(exponent or 1) - bool(minus)


def test_what_the_code_cites_exists() -> None:
    cited = {
        (number, path.name)
        for path in (ROOT / "ckptd").rglob("*.py")
        for number in re.findall(
            r"\bspec (?:sections? )?(\d+(?:\.\d+)?)", path.read_text(), re.IGNORECASE
        )
    }
    assert len(cited) > 10
    assert not [c for c in cited if c[0] not in HEADINGS]


def test_the_page_cites_what_exists() -> None:
    cited = set(re.findall(r"\((\d+\.\d+)\)", PAGE)) | set(
        re.findall(r"section (\d+(?:\.\d+)?)", PAGE)
    )
    assert cited <= HEADINGS


def test_links() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", PAGE):
        assert (ROOT / "docs/spec" / target).exists(), target
