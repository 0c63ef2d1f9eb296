"""Native code against the installed PyTorch: its ABI, headers and compile command.

PyTorch is not imported here: some of what is built must be loaded before it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptd.base.runtime.nativebuild import NativeBuild
from ckptd.errors import UsageError

_ABI = "import torch; print(int(torch.compiled_with_cxx11_abi()))"


@dataclass(frozen=True, slots=True)
class TorchExtension(NativeBuild):
    """An extension of Python; see `NativeBuild`.

    Attributes
    ----------
    libraries
        Of PyTorch.
    """

    libraries: Sequence[str]

    def wanted(self) -> str:
        """See `NativeBuild.wanted`."""
        # It looks for PyTorch's libraries where they lay, and not in another environment.
        lies = os.fsencode(_torch_folder())
        source = hashlib.sha256(self.source.read_bytes() + lies).hexdigest()[:16]
        abi = sysconfig.get_config_var("SOABI")
        return f"{self.name}-torch{_torch_version()}-{abi}-{source}"

    def command(self, compiler: str, output: Path) -> list[str]:
        """See `NativeBuild.command`."""
        torch = _torch_folder()
        headers = (torch / "include", torch / "include/torch/csrc/api/include")
        abi = self.run([sys.executable, "-c", _ABI]).strip()
        return [
            compiler,
            *("-O2", "-std=c++20", "-fPIC", "-shared", f"-DTORCH_EXTENSION_NAME={self.name}"),
            f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
            *(f"-isystem{path}" for path in (*headers, sysconfig.get_path("include"))),
            str(self.source),
            *("-o", str(output), f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}"),
            *(f"-l{library}" for library in self.libraries),
        ]

    @property
    def needs(self) -> str:
        """See `NativeBuild.needs`."""
        return f"headers of PyTorch {_torch_version()} that this compiler takes"


def _torch_version() -> str:
    return importlib.metadata.version("torch")


def _torch_folder() -> Path:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise UsageError("PyTorch is not installed", wanted="torch", hint="pip install torch")
    return Path(found.origin).parent
