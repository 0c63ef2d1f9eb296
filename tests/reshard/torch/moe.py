"""The trainer with experts of docs/examples/move_experts.py, for tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

_PATH = Path(__file__).parents[3] / "docs/examples/move_experts.py"
_SPEC = importlib.util.spec_from_file_location("move_experts", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
example: Any = sys.modules.setdefault("move_experts", importlib.util.module_from_spec(_SPEC))
_SPEC.loader.exec_module(example)

EXPERTS, LAYERS = example.EXPERTS, example.LAYERS
Trainer, evenly, layout_of = example.Trainer, example.evenly, example.layout_of
