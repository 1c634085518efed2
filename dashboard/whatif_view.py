"""Answers of set-ups as the numbers and texts that the what-if page shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dashboard.texts import EMULATED, format_ms, format_number


@dataclass(frozen=True)
class SetupRow:
    """One set-up: what was asked, and the answer.

    Attributes:
        title: the set-up in a few words.
        tpot_ms: time per output token; None where it is impossible.
        low_ms, high_ms: its band; None where nobody validated such predictions.
        bound_ms: what no policy could beat.
        parts_ms: the critical path by its parts, adding up to `tpot_ms`.
        headline, sentence: the answer in words.
        cells: a row of the page's table.
    """

    title: str
    tpot_ms: float | None
    low_ms: float | None = None
    high_ms: float | None = None
    bound_ms: float | None = None
    parts_ms: dict[str, float] = field(default_factory=dict)
    emulated: bool = False
    headline: str = ""
    sentence: str = ""
    cells: dict[str, Any] = field(default_factory=dict)


def setup_rows(titles: Sequence[str], answers: Sequence[dict[str, Any]]) -> list[SetupRow]:
    """Rows for answers of `simulator.sweep.answer`, in order."""
    return [_row(title, answer) for title, answer in zip(titles, answers, strict=True)]


def _row(title: str, answer: dict[str, Any]) -> SetupRow:
    if "error" in answer:
        why = str(answer["error"])
        cells = {"setup": title, "band": f"impossible: {why}"}
        return SetupRow(title, None, headline="This cannot be run", sentence=why, cells=cells)
    tpot_ms, low_ms, high_ms = answer["tpot_ms"], answer["tpot_low_ms"], answer["tpot_high_ms"]
    band = "no band: nobody validated" if low_ms is None else f"{format_number(low_ms)} to {format_number(high_ms)}"
    expected = "no error band" if low_ms is None else f"90 % band {band} ms"
    label = f", {EMULATED}" if answer["emulated"] else ""
    parts_ms: dict[str, float] = {}
    for share in answer["critical_path"]:
        parts_ms[share["name"]] = parts_ms.get(share["name"], 0.0) + share["ms"]
    return SetupRow(
        title=title,
        tpot_ms=tpot_ms,
        low_ms=low_ms,
        high_ms=high_ms,
        bound_ms=answer["bound_ms"],
        parts_ms=parts_ms,
        emulated=answer["emulated"],
        headline=f"{format_ms(tpot_ms)} per token, {answer['tokens_per_s']:.1f} tokens per second ({expected}{label})",
        sentence=" ".join([answer["what_limits"], *[f"{note[0].upper()}{note[1:]}." for note in answer["notes"]]]),
        cells={
            "setup": title,
            "tpot_ms": tpot_ms,
            "band": band,
            "tokens_per_s": answer["tokens_per_s"],
            "hit_percent": 100 * answer["decode_hit_rate"],
            "bound_ms": answer["bound_ms"],
            "regret_ratio": answer["regret_ratio"],
        },
    )
