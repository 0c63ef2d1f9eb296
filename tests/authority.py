"""An authority of certificates in files, as cert-manager and SPIFFE's helpers write them."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ckptd.base.net import tls
from ckptd.base.net.certificates import VARIABLES

HOSTS = (x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1")))


class Authority:
    """One that ckptd knows nothing of: P-256, with an authority between it and the leaves."""

    def __init__(self) -> None:
        self.key, self.below = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
        self.root = self.made("root", self.key, self.key, "root", path=1)
        self.between = self.made("between", self.below, self.key, "root", path=0)
        self.pem = self.root.public_bytes(Encoding.PEM)

    def made(
        self,
        name: str,
        key: ec.EllipticCurvePrivateKey,
        by: ec.EllipticCurvePrivateKey,
        issuer: str,
        *,
        path: int | None = None,
        uris: tuple[str, ...] = (),
    ) -> x509.Certificate:
        ca, now = path is not None, datetime.datetime.now(datetime.UTC)
        usage = x509.KeyUsage(not ca, False, False, False, False, ca, ca, False, False)
        build = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca, path), True)
            .add_extension(usage, True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key()), False
            )
        )
        if uris:
            names = [*HOSTS, *map(x509.UniformResourceIdentifier, uris)]
            both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
            build = build.add_extension(x509.SubjectAlternativeName(names), False)
            build = build.add_extension(x509.ExtendedKeyUsage(both), False)
        return build.sign(by, SHA256())

    def put(self, folder: Path, *uris: str) -> None:
        """Write a new leaf there, as a helper that renews it does."""
        key = ec.generate_private_key(ec.SECP256R1())
        leaf = self.made("leaf", key, self.below, "between", uris=uris)
        chain = leaf.public_bytes(Encoding.PEM) + self.between.public_bytes(Encoding.PEM)
        folder.mkdir(exist_ok=True)
        (folder / "tls.crt").write_bytes(chain)
        (folder / "tls.key").write_bytes(
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        )
        (folder / "ca.crt").write_bytes(self.pem)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder where each role has a folder with its files."""
    for name, file in zip(VARIABLES, ("tls.crt", "tls.key", "ca.crt"), strict=True):
        monkeypatch.setenv(name, f"{tmp_path}/{{role}}/{file}")
    tls.identity.cache_clear()
    yield tmp_path
    tls.identity.cache_clear()
