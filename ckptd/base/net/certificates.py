"""Certificates from files of another authority (``CKPTD_TLS_CERTIFICATE``, ``_KEY``, ``_CA``).

In it: how often they are read again; the role and node in their URI, and refusals of others.

Three variables name them: ``CKPTD_TLS_CERTIFICATE``, ``CKPTD_TLS_KEY`` and ``CKPTD_TLS_CA``, all in
PEM; in a path, the role that a process needs takes the place of ``{role}``: it may be several.
The role and the node are those of the one URI of the certificate that ends in
``/ckptd/ROLE/NODE``, such as ``spiffe://example.org/ckptd/agent/node-3``.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ckptd.base.net.roles import Certified, Role
from ckptd.errors import UsageError

VARIABLES = ("CKPTD_TLS_CERTIFICATE", "CKPTD_TLS_KEY", "CKPTD_TLS_CA")
"""Paths of the certificate with its chain, of its key, and of the authorities that are believed."""
REREAD_S = 60.0
"""The files are read again for a connection that is made so much later, in seconds."""
_NAMED = re.compile(r"(?:ckptd://|[a-z][a-z0-9+.-]*://[^?#]*/ckptd/)([a-z]+)/([^/?#]+)", re.ASCII)


def given_files() -> bool:
    """Whether this process's certificates are files.

    Raises
    ------
    UsageError
        Some of the variables are set, and not all.
    """
    missing = [name for name in VARIABLES if not os.environ.get(name)]
    if missing and len(missing) < len(VARIABLES):
        raise UsageError(
            "certificates from files need all three of their variables",
            where=", ".join(missing),
            wanted=", ".join(VARIABLES),
        )
    return not missing


def read_files(role: Role) -> tuple[bytes, bytes, float]:
    """Return authorities, and a certificate with its key, in PEM; and until when they count as new.

    Raises
    ------
    UsageError
        A file cannot be read.
    """
    found = []
    for name in VARIABLES:
        path = os.environ.get(name, "").replace("{role}", role)
        try:
            found.append(Path(path).read_bytes())
        except OSError as error:
            raise UsageError(
                f"a file of the certificate of role {role} cannot be read",
                where=name,
                found=f"{path}: {error.strerror}",
            ) from error
    certificate, key, authorities = found
    return authorities, key + b"\n" + certificate, time.time() + REREAD_S


def check_own(pem: bytes, role: Role, node: str) -> None:
    """Refuse a certificate of this process's own that names another role, or as an agent's a node.

    Parameters
    ----------
    node
        Empty: any.

    Raises
    ------
    UsageError
        Others would refuse it, and might only end the connection.
    """
    from cryptography import x509

    shown: Any = x509.load_pem_x509_certificate(pem).extensions
    try:
        names = shown.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except x509.ExtensionNotFound:
        uris = []
    found = certified({"subjectAltName": [("URI", uri) for uri in uris]})
    if found.role != role or (role == "agent" and node and found.node != node):
        raise UsageError(
            "this process's certificate names another role or node",
            where=os.environ.get(VARIABLES[0]),
            wanted=f"one URI that ends in /ckptd/{role}/{node if role == 'agent' else 'NODE'}",
            found=", ".join(uris) or "no URI",
        )


def certified(shown: dict[str, Any]) -> Certified:
    """Return the role and the node in a peer's certificate; empty unless exactly one URI has both.

    Parameters
    ----------
    shown
        As of `ssl.SSLSocket.getpeercert`.
    """
    uris = [name for kind, name in shown.get("subjectAltName", ()) if kind == "URI"]
    found = [named for uri in uris if (named := _NAMED.fullmatch(uri))]
    if len(found) != 1:
        return Certified("", "")
    return Certified(found[0][1], unquote(found[0][2]))
