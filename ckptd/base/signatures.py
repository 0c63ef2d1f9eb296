"""Signatures of files with public keys (OpenSSF Model Signing): kinds of keys, curves, PEM, bundle.

In it: the largest key and signature; errors where no trusted key has signed.

A signature is a Sigstore bundle with a DSSE envelope around an in-toto statement, which lists names
of files and their BLAKE3. Keys are Ed25519, or on the curves P-256, P-384 and P-521: those the
package ``model-signing`` verifies too.

What hashes needs the extra ``sign``: the package `blake3`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from ckptd.base.net.signing import derived_key
from ckptd.decoding import json_decoder
from ckptd.errors import CorruptError, NotFoundError, RefusedError, UsageError

if TYPE_CHECKING:
    import blake3
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    PrivateKey: TypeAlias = ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey
    PublicKey: TypeAlias = ed25519.Ed25519PublicKey | ec.EllipticCurvePublicKey

_PAYLOAD = "application/vnd.in-toto+json"
_BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_STATEMENT = "https://in-toto.io/Statement/v1"
_PREDICATE = "https://model_signing/signature/v1.0"
_SERIALIZATION = {
    "method": "files",
    "hash_type": "blake3",
    "allow_symlinks": False,
    "ignore_paths": [],
}
_CURVES = {"secp256r1": "SHA256", "secp384r1": "SHA384", "secp521r1": "SHA512"}
_MOST_KEY_BYTES = 1 << 16
MOST_BYTES = 1 << 30
"""Of a signature."""
Texts: TypeAlias = tuple[str, ...]


class Signed(NamedTuple):
    """The content of a signature by a trusted key.

    Attributes
    ----------
    name
        What the files are together.
    files
        BLAKE3 in hexadecimal digits, by file.
    key
        `key_id` of the key.
    """

    name: str
    files: dict[str, str]
    key: str


class _Resource(msgspec.Struct, frozen=True):
    name: str
    algorithm: str
    digest: str


class _Subject(msgspec.Struct, frozen=True):
    name: str
    digest: dict[str, str]


class _Predicate(msgspec.Struct, frozen=True):
    serialization: dict[str, Any]
    resources: list[_Resource]


class _Statement(msgspec.Struct, frozen=True, rename={"type": "_type"}):
    type: str
    subject: list[_Subject]
    predicateType: str
    predicate: _Predicate


class _Signature(msgspec.Struct, frozen=True):
    sig: str
    keyid: str = ""


class _Envelope(msgspec.Struct, frozen=True, rename="camel"):
    payload: str
    payload_type: str
    signatures: list[_Signature]


class _PublicKey(msgspec.Struct, frozen=True):
    hint: str


class _Material(msgspec.Struct, frozen=True, rename="camel"):
    public_key: _PublicKey
    tlog_entries: list[Any] = []


class _Bundle(msgspec.Struct, frozen=True, rename="camel"):
    media_type: str
    verification_material: _Material
    dsse_envelope: _Envelope


_bundles, _statements = json_decoder(_Bundle), json_decoder(_Statement)


def need_blake3() -> type[blake3.blake3]:
    """Return the hash; `UsageError` of the kind ``missing-package`` without the extra ``sign``."""
    try:
        from blake3 import blake3
    except ImportError as error:
        raise UsageError(
            "signatures need a package that is not installed",
            kind="missing-package",
            found=str(error),
            hint="pip install 'ckptd[sign]'",
        ) from None
    return blake3


def read_private(path: str) -> PrivateKey:
    """Return the private key in a PEM file that its owner alone may read.

    Raises
    ------
    UsageError
        The key is of a kind that cannot sign, or other users may read its file. NotFoundError: the
        file does not exist.
    """
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    raw = _read(path, secret=True)
    found: PrivateKey = _loaded(raw, path, lambda raw: load_pem_private_key(raw, None))
    _check_kind(found.public_key(), path)
    return found


def read_public(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> Texts:
    """Return the public keys in PEM files, as PEM.

    Raises
    ------
    UsageError
        A key is of a kind that cannot verify. NotFoundError: a file does not exist.
    """
    several = (paths,) if isinstance(paths, (str, os.PathLike)) else paths
    texts = [(os.fspath(path), _read(os.fspath(path))) for path in several]
    return tuple(pem(load_public(raw, path)).decode() for path, raw in texts)


def load_public(raw: bytes, where: str = "") -> PublicKey:
    """Return a public key; `UsageError` where it is of a kind that cannot verify."""
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    found: PublicKey = _loaded(raw, where, load_pem_public_key)
    _check_kind(found, where)
    return found


def _read(path: str, *, secret: bool = False) -> bytes:
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if secret and mode & 0o077:
                raise UsageError(
                    "others may read this private key",
                    kind="bad-key",
                    where=path,
                    wanted="mode 0600",
                    found=f"mode {mode & 0o7777:04o}",
                    hint=f"chmod 600 {path}",
                )
            return file.read(_MOST_KEY_BYTES)
    except FileNotFoundError:
        raise NotFoundError("the file of the key is not there", where=path) from None
    except OSError as error:
        raise _no_key(path, error) from None


def _loaded(raw: bytes, where: str, load: Callable[[bytes], Any]) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        return load(raw)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _no_key(where, error) from None


def _no_key(where: str, error: Exception) -> UsageError:
    return UsageError(
        "not a key",
        kind="bad-key",
        where=where,
        wanted="a PEM file without a password: openssl genpkey -algorithm ed25519",
        found=str(error)[:200],
    )


def _check_kind(key: Any, where: str) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    curve = key.curve.name if isinstance(key, ec.EllipticCurvePublicKey) else ""
    if not isinstance(key, ed25519.Ed25519PublicKey) and curve not in _CURVES:
        raise UsageError(
            "a key of this kind does not sign checkpoints",
            kind="bad-key",
            where=where,
            wanted="Ed25519, or the curve P-256, P-384 or P-521",
            found=curve or type(key).__name__,
        )


def voucher(key: PrivateKey, about: str) -> Callable[[str, bytes], bytes]:
    """Return what makes 32 bytes by which processes that have one private key believe each other.

    They are a MAC of a name and bytes. Of anything but `about` they say nothing.
    """
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    raw = key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
    return lambda name, data: hmac.digest(derived_key(raw, "voucher", about, name), data, "sha256")


def key_id(key: PublicKey) -> str:
    """Return what names a key: the SHA-256 of its PEM, as in OpenSSF Model Signing."""
    return hashlib.sha256(pem(key)).hexdigest()


def pem(key: PublicKey) -> bytes:
    """Return a public key as text."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def signature_key(folder: str, write_id: str, key: PublicKey) -> str:
    """Return where the signature of a key over a commit is, in the folder of the checkpoint.

    `write_id` is that of the commit record: of two processes that commit one attempt, each signs
    the record that it means to create.
    """
    return f"{folder}signature-{write_id}-{key_id(key)[:32]}.json"


def signed(name: str, files: Mapping[str, str], key: PrivateKey) -> bytes:
    """Return the signature of `key` over files.

    Parameters
    ----------
    name
        What the files are together.
    files
        BLAKE3 in hexadecimal digits, by file.
    """
    resources = [_Resource(path, "blake3", files[path]) for path in sorted(files)]
    statement = _Statement(
        _STATEMENT,
        [_Subject(name, {"sha256": _root(resources)})],
        _PREDICATE,
        _Predicate(_SERIALIZATION, resources),
    )
    payload = msgspec.json.encode(statement)
    bundle = _Bundle(
        _BUNDLE,
        _Material(_PublicKey(key_id(key.public_key()))),
        _Envelope(_text(payload), _PAYLOAD, [_Signature(_text(_made(key, _pae(payload))))]),
    )
    return msgspec.json.encode(bundle)


def opened(raw: bytes, keys: Collection[PublicKey], where: str) -> Signed:
    """Return what a signature says, if it is by one of `keys`.

    Raises
    ------
    RefusedError
        It is by another key, or not by the key that it names.
    CorruptError
        It is no signature.
    """
    try:
        bundle = _bundles.decode(raw)
        envelope = bundle.dsse_envelope
        payload = base64.b64decode(envelope.payload, validate=True)
        made = [base64.b64decode(s.sig, validate=True) for s in envelope.signatures]
    except (msgspec.MsgspecError, ValueError) as error:
        raise CorruptError("not a signature", where=where, found=str(error)[:200]) from None
    hint = bundle.verification_material.public_key.hint
    if bundle.media_type != _BUNDLE or envelope.payload_type != _PAYLOAD or len(made) != 1:
        raise CorruptError("not a signature", where=where, wanted=f"one of {_BUNDLE}")
    key = next((k for k in keys if key_id(k) == hint), None)
    if key is None:
        raise refused("the signature is not by a trusted key", where, keys, f"key {hint[:64]}")
    if not _is_made(key, made[0], _pae(payload)):
        raise refused("the signature is not what its key made", where, keys, f"key {hint[:64]}")
    # From here on it is the key's own words.
    try:
        statement = _statements.decode(payload)
    except msgspec.MsgspecError as error:
        raise CorruptError("not a statement", where=where, found=str(error)[:200]) from None
    resources = statement.predicate.resources
    files = {r.name: r.digest for r in resources if r.algorithm == "blake3"}
    if (
        (statement.type, statement.predicateType) != (_STATEMENT, _PREDICATE)
        or [s.digest.get("sha256") for s in statement.subject] != [_root(resources)]
        or len(files) != len(resources)
    ):
        raise CorruptError("a signature of something else", where=where, wanted=_PREDICATE)
    return Signed(statement.subject[0].name, files, hint)


def refused(message: str, where: str, keys: Collection[PublicKey], found: str) -> RefusedError:
    """Return the error for what no trusted key has signed."""
    wanted = ", ".join(key_id(k)[:16] for k in keys) or "none"
    return RefusedError(message, where=where, wanted=f"a key of: {wanted}", found=found)


def _root(resources: Collection[_Resource]) -> str:
    try:
        joined = b"".join(bytes.fromhex(r.digest) for r in resources)
    except ValueError:
        return ""
    return hashlib.sha256(joined).hexdigest()


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _pae(payload: bytes) -> bytes:
    return b"DSSEv1 %d %s %d " % (len(_PAYLOAD), _PAYLOAD.encode(), len(payload)) + payload


def _scheme(key: PrivateKey | PublicKey) -> tuple[Any, ...]:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    curve = getattr(key, "curve", None)
    return () if curve is None else (ec.ECDSA(getattr(hashes, _CURVES[curve.name])()),)


def _made(key: PrivateKey, message: bytes) -> bytes:
    return key.sign(message, *_scheme(key))


def _is_made(key: PublicKey, signature: bytes, message: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, message, *_scheme(key))
    except InvalidSignature:
        return False
    return True
