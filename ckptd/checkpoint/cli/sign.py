"""``ckptd sign``: signs a checkpoint for ``ckptd verify --key``."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from ckptd.base.signatures import key_id, pem, read_private, signature_key
from ckptd.checkpoint.cli.address import CheckpointAddress, CheckpointDocument, Where, held, opened
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.tools.sign import sign as sign_one
from ckptd.checkpoint.tools.verify import verify
from ckptd.cli.output import Json, Reply, progress_bar
from ckptd.errors import CorruptError
from ckptd.store.base import TrustSpec, wrap


class SignDocument(CheckpointDocument, frozen=True, kw_only=True, tag="sign"):
    """The document of ``ckptd sign --json``: where the signature is, and which key made it."""

    signature: str
    key: str


def sign(
    where: Where,
    /,
    *,
    key: Annotated[str, Parameter(help="PEM of the private key: Ed25519, P-256, P-384 or P-521.")],
    json: Json = False,
) -> Reply:
    """Sign every file of a checkpoint that verifies. With several keys: once with each.

    Signed again with one key, it must be what that key has signed. With another key, name the old
    one in CKPTD_TRUST: then only what that has signed is signed.
    """
    private = read_private(key)
    public = private.public_key()
    address = CheckpointAddress.of(where)
    with opened(address.root, foreign=False) as catalogue:
        name = address.find(catalogue)
        commit = catalogue.commit(name)
        if catalogue.store.exists(signature_key(commit.folder, commit.write_id, public)):
            catalogue = Catalogue(wrap(catalogue.store, TrustSpec((pem(public).decode(),))))
        with held(catalogue, name, "sign"):
            with progress_bar(f"step {name.step}") as bar:
                report = verify(catalogue, name, progress=bar)
            if report.findings:
                raise CorruptError(
                    "the checkpoint is not what was saved: it is not signed",
                    where=where,
                    found=report.findings[0].message,
                    hint="ckptd verify shows all that is wrong",
                )
            with progress_bar(f"step {name.step}, hashes") as bar:
                signature = sign_one(catalogue, name, private, bar)
        document = SignDocument(
            root=catalogue.store.url,
            step=name.step,
            generation=name.generation,
            signature=signature,
            key=key_id(public),
        )
    return Reply(document, _show)


def _show(document: SignDocument) -> None:
    print(
        f"step {document.step} of generation {document.generation}: signed by {document.key[:16]}"
    )
    print(f"  {document.signature}")
