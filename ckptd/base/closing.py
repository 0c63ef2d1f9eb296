"""The end of a ``with`` block, for what is to be closed there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Base of what a ``with`` block closes at its end."""

    @abstractmethod
    def close(self) -> None:
        """Release all that it holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
