"""What a daemon does where its job has a controller: it listens, judges, and acts."""

from __future__ import annotations
