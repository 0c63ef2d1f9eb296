"""The demo: small GPTs are trained for real, killed, watched, resumed: ``ckptd demo``."""

from __future__ import annotations

from ckptd.plugins import Verb

__all__ = ["VERB"]

VERB = Verb(
    "ckptd_demo.verb:demo",
    "Train, kill a rank in the middle of a save, resume on others.\n\nExample: ckptd demo --quick",
)
