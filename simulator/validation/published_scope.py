"""Which published rows can be predicted, which only ranked, and why not the others."""

from __future__ import annotations

from simulator.validation.published_rows import PublishedRow

_SKIPPED: tuple[tuple[tuple[str, ...], str], ...] = (
    (("nvme", "ssd", "from disk", "storage tier", "page cache"), "experts come from storage, not from memory"),
    (("cold file cache", "paging", "swapping"), "the run reads its weights from storage"),
    (("unified", "apple"), "unified memory: no link between host and device"),
    (("software regression",), "the source reports a fault of the software"),
)
_RANKED: tuple[tuple[tuple[str, ...], str], ...] = (
    (("not single-stream", "concurrency not given", "batch throughput"), "throughput of unknown concurrency"),
    (("end to end with prefill", "end-to-end"), "end-to-end rate with prefill, not decode"),
    (("precision, host and link not given", "precision may differ"), "precision, host and link not given"),
    (("vram spill", "spills to host", "more vram than free"), "device memory overcommitted"),
    (("no expert split", "naive"), "an untuned start whose placement is not given"),
)
NO_DECODE = "no decode rate (prefill is ranked only)"


def out_of_scope(row: PublishedRow) -> str | None:
    """Why a row is out of scope before anything is looked up; None where it is not."""
    if row.fault:
        return row.fault
    if not row.model:
        return "model not named"
    return next((reason for words, reason in _SKIPPED if any(word in row.text for word in words)), None)


def ranking_only_reason(row: PublishedRow, *, precision_given: bool) -> str | None:
    """Why the prediction of a row ranks settings, but is left out of error statistics; None where it counts."""
    if row.grade.upper() == "C":
        return "grade C: several inputs are missing"
    if not precision_given:
        return "weight precision not given"
    return next((reason for words, reason in _RANKED if any(word in row.text for word in words)), None)
