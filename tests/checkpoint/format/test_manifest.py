from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import zstandard
from hypothesis import given

from ckptd.checkpoint.format import manifest as module
from ckptd.checkpoint.format.manifest import (
    FileEntry,
    Manifest,
    MeshEntry,
    ObjectEntry,
    TensorEntry,
    WitnessEntry,
    decode_json,
    decode_manifest,
    encode_manifest,
)
from ckptd.errors import CorruptError
from tests.checkpoint.format.strategies import Sample, manifests

SMALL = Manifest(
    step=1200,
    generation=3,
    attempt="a1",
    world_size=2,
    files=(FileEntry("data/000000001200-g00000003-a1/r00000.safetensors", 0),),
    grids=(),
    owners=(),
    tensors=(),
    objects=(ObjectEntry("lr", value=0.1), ObjectEntry("rng", tensor="rng", per_rank="reseed")),
    meshes=(MeshEntry(("dp", "tp"), (1, 2), ((0, 1, 2),)),),
    witness=WitnessEntry("sample-1", "0f" * 16),
    metadata={"loss": 1.5, "tags": ["best"]},
    lay="mesh F = dp:2",
)


def large() -> Manifest:
    tensors = tuple(
        TensorEntry(f"model.layers.{i}.weight", "float32", (i, 3), 0, 0) for i in range(30_000)
    )
    return msgspec.structs.replace(SMALL, tensors=tensors)


@given(manifests())
def test_round_trip(sample: Sample) -> None:
    name, raw = encode_manifest(sample.manifest)
    back = decode_manifest(raw, name)
    assert name == "manifest.json"
    assert back == msgspec.structs.replace(sample.manifest, format="ckptd", version=1)
    assert encode_manifest(back) == (name, raw)


def test_all_fields_come_back() -> None:
    name, raw = encode_manifest(SMALL)
    assert decode_manifest(raw, name) == msgspec.structs.replace(SMALL, format="ckptd", version=1)
    assert json.loads(raw)["metadata"] == {"loss": 1.5, "tags": ["best"]}


def test_a_large_manifest_is_compressed() -> None:
    manifest = large()
    name, raw = encode_manifest(manifest)
    assert name == "manifest.json.zst"
    assert len(raw) * 8 < len(msgspec.json.encode(manifest))
    assert decode_manifest(raw, name).tensors == manifest.tensors
    assert encode_manifest(manifest) == (name, raw)


def test_what_compresses_like_a_bomb_is_stored_as_it_is() -> None:
    manifest = msgspec.structs.replace(SMALL, metadata={"zeros": "0" * 8_000_000})
    name, raw = encode_manifest(manifest)
    assert name == "manifest.json"
    assert decode_manifest(raw, name).metadata == manifest.metadata


def document(**changes: Any) -> bytes:
    raw = json.loads(encode_manifest(SMALL)[1])
    return json.dumps(raw | changes).encode()


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"a": 1, "a": 1}', "not JSON"),
        (b'{"a": {"b": 1, "b": 2}}', "not JSON"),
        (b'{"a": NaN}', "not JSON"),
        (b'{"a": -Infinity}', "not JSON"),
        (b'{"a": 1e999}', "not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a":' * 100_000, "not JSON"),
        (b"\xff", "not JSON"),
        (b'{"a": "\\uD83D"}', "not JSON"),
        ('{"format": "ckptd"}'.encode("utf-16"), "not JSON"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b"{}", "not a ckptd manifest"),
        (document(format="other"), "not a ckptd manifest"),
        (document(version="1"), "not a ckptd manifest"),
        (document(version=True), "not a ckptd manifest"),
        (document(version=0), "not a ckptd manifest"),
        (document(version=2), "written by a newer ckptd"),
        (document(requires=["new-thing"]), "written by a newer ckptd"),
        (document(requires="new-thing"), "written by a newer ckptd"),
        (document(requires=[[]]), "written by a newer ckptd"),
        (document(step="1200"), "not a Manifest"),
        (document(step=None), "not a Manifest"),
        (document(tensors=[{}]), "not a Manifest"),
        (document(files=[{"path": 1, "rank": 0}]), "not a Manifest"),
        (document(owners=[[[0, 1]]]), "not a Manifest"),
        (document(metadata=[]), "not a Manifest"),
        (document(witness={"words": "sample-1"}), "not a Manifest"),
    ],
)
def test_broken_documents(raw: bytes, words: str) -> None:
    with pytest.raises(CorruptError) as caught:
        decode_manifest(raw, "manifest.json")
    assert words in caught.value.message
    assert caught.value.where == "manifest.json"


def test_a_newer_version_says_how_to_get_it() -> None:
    with pytest.raises(CorruptError) as caught:
        decode_manifest(document(version=7), "manifest.json")
    assert "pip install" in (caught.value.hint or "")


def test_fields_of_later_minor_changes_are_ignored() -> None:
    assert decode_manifest(document(comment="hello"), "manifest.json").step == 1200


def packed(raw: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(level=19, **options).compress(raw)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "not zstd"),
        (b"not zstd at all", "not zstd"),
        (packed(b" " * (1 << 26)), "manifest decompresses to too much"),
        (packed(document(), write_content_size=False), "manifest decompresses to too much"),
        (packed(document())[:-3], "not zstd"),
        (packed(document()) + b"more", "not zstd"),
        (packed(document()) + packed(document()), "not zstd"),
        (packed(b" " * (1 << 17)), "manifest decompresses to too much"),
    ],
)
def test_broken_compression(raw: bytes, words: str) -> None:
    with pytest.raises(CorruptError) as caught:
        decode_manifest(raw, "manifest.json.zst")
    assert words in caught.value.message


def test_a_compressed_manifest_without_the_suffix_is_no_json() -> None:
    with pytest.raises(CorruptError):
        decode_manifest(packed(document()), "manifest.json")


def test_a_manifest_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(CorruptError) as caught:
        decode_manifest(document(), "manifest.json")
    assert "manifest too large" in caught.value.message


def test_json_is_parsed_whole() -> None:
    assert decode_json(b'{"a": [1, 2.5, "x", null, true]}', "x") == {"a": [1, 2.5, "x", None, True]}
    with pytest.raises(CorruptError):
        decode_json(b"{} {}", "x")


def _alike(raw: bytes, like: Manifest) -> Any:
    """Return what is decoded, or the error, when another manifest is known; as without it."""
    found: list[Any] = []
    for known in (None, like):
        try:
            found.append(decode_manifest(raw, "here", known))
        except CorruptError as error:
            found.append((error.message, error.kind, error.found))
    assert found[0] == found[1]
    return found[1]


def test_a_table_that_is_known_is_not_parsed_and_nothing_else_is_taken_for_it() -> None:
    like = decode_manifest(msgspec.json.encode(json.loads(document())), "here")
    like = msgspec.structs.replace(like, tensors=large().tensors)
    raw = msgspec.json.encode(msgspec.structs.replace(like, format="ckptd", version=1))
    table = msgspec.json.encode(like.tensors)
    other = msgspec.structs.replace(like, step=like.step + 1, metadata={"a": [1, {"tensors": 2}]})
    later = msgspec.json.encode(msgspec.structs.replace(other, format="ckptd", version=1))
    assert _alike(later, like) == other
    assert decode_manifest(later, "here", like).tensors is like.tensors
    head, tail = raw.split(table)
    escaped = json.dumps(table.decode()).encode()
    for text in (
        head + table + table + tail,
        head + b"[]" + tail,
        head + escaped + tail,
        head + b"[" + table + b"]" + tail,
        head + table[:-1] + b"," + table[1:] + tail,
        head + table.replace(b"float32", b"float64", 1) + tail,
        raw[:-1] + b',"tensors":' + table + b"}",
        raw[:-1] + b',"tensors":[]}',
        raw[:-1] + b',"metadata":{"x":' + table + b"}}",
        (head + b"[]" + tail)[:-1] + b',"metadata":{"tensors":' + table + b"}}",
        (head + b"[]" + tail)[:-1] + b',"metadata":{"tensors":' + escaped + b"}}",
        raw[:-1] + b',"metadata":{"x":"' + table + b'"}}',
        raw.replace(b'"version":1', b'"version":2'),
        raw[:-1],
        raw + b" {}",
        table,
    ):
        _alike(text, like)
