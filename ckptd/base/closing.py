"""The end of a ``with`` block, for what is to be closed there."""

from __future__ import annotations

from typing import Self


class Closing:
    """Base of what a ``with`` block closes at its end."""

    def close(self) -> None:
        """Release all that it holds."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
