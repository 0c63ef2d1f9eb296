"""``python -m ckptd``: the command line, where no script of it is on the path."""

from __future__ import annotations

from ckptd.cli.main import main
from ckptd.crashes import report_crashes

if __name__ == "__main__":
    report_crashes()
    main()
