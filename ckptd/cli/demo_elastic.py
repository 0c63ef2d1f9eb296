"""What the demo says of its elastic job."""

from __future__ import annotations

from typing import Any

from ckptd.cli.output import print_table

__all__ = ["show_elastic"]

PARTS = ("detect", "fence", "plan", "spawn", "import", "init", "load", "first_step")


def show_elastic(told: dict[str, Any] | None, note: str) -> None:
    """Print deeds with their consequences, and what each recovery took, by its parts.

    Parameters
    ----------
    told
        The report's `elastic`; None where there was none.
    note
        Why there was none.
    """
    print()
    if told is None:
        print(note)
        return
    print(
        f"{told['ranks']} ranks on {told['nodes']} nodes under ckptd run, {told['steps']} steps;"
        " what was done to them, and when they trained again:"
    )
    lost = [life["lost"] for life in told["lives"][1:]]
    print_table(
        ("DONE", ">RANKS THEN", ">AFTER", ">STEPS AGAIN"),
        [
            (deed["what"], str(deed["ranks"]), f"{deed['after_s']:.2f} s", str(again))
            for deed, again in zip(told["deeds"], lost, strict=False)
        ],
    )
    print("Recoveries, as the controller timed them; seconds:")
    print_table(
        ("CAUSE", "LEVEL", *(f">{part.upper().replace('_', ' ')}" for part in PARTS), ">TOTAL"),
        [_row(one) for one in told["recoveries"]],
    )
    print(
        f"Losses: at most {told['gap']:.1e} from the uninterrupted run (allowed"
        f" {told['tolerance']:.0e}); violations: {len(told['violations'])}"
    )
    for text in told["violations"]:
        print(f"  {text}")


def _row(recovery: dict[str, Any]) -> tuple[str, ...]:
    cells = [recovery.get(part) for part in PARTS]
    shown = ["" if cell is None else f"{cell:.2f}" for cell in cells]
    cause = recovery["cause"]
    return (cause, f"L{recovery['level']}", *shown, f"{recovery['total']:.2f}")
