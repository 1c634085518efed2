"""One HTML file with the figures of a folder: opens by double click, loads nothing from anywhere."""

from __future__ import annotations

from html import escape
from pathlib import Path

from plotly.offline import get_plotlyjs

from dashboard import figures, summary, timeline_figure, views
from dashboard.data import HARDWARE_NAME, TRACE_NAME, TUNED_NAME, NamedRun, Snapshot, Workspace
from dashboard.report_parts import figure_html, routing_sections, section, validation_sections
from dashboard.table import COLUMN_GROUPS, TABLE_NOTE, Cell, cells
from dashboard.texts import EMULATED
from dashboard.timeline_view import default_window, runs_with_spans, timeline
from trace_capture.files import file_digest, write_text_atomic
from trace_capture.run import RUN_SUFFIX
from trace_capture.versions import software_versions

TITLE = "MoE Offload Studio: report"
EMULATED_NOTE = "Copies were paced by software; their times are not those of a PCIe link."
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif; color: #1f2933;
  background: #f6f7f9; margin: 0; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 1.6rem; margin: 0 0 4px; } h2 { font-size: 1.15rem; margin: 0 0 8px; }
section { background: #fff; border: 1px solid #e1e5ea; border-radius: 8px; padding: 16px; margin: 16px 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(230px, 1fr)); gap: 12px; }
.cards > div { background: #fff; border: 1px solid #e1e5ea; border-radius: 8px; padding: 12px 16px; }
.value { font-size: 1.3rem; font-weight: 600; overflow-wrap: anywhere; }
.muted { color: #52606d; font-size: .9rem; overflow-wrap: anywhere; }
.badge { display: inline-block; border: 1px solid #D55E00; color: #9c4400; border-radius: 4px; padding: 0 6px;
  font-size: .8rem; }
.problem { border-left: 4px solid #D55E00; padding: 4px 12px; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: 6px 10px; border-bottom: 1px solid #e1e5ea; text-align: right; white-space: nowrap; }
th:first-child, td:first-child, .text td { text-align: left; white-space: normal; }
tbody td:first-child { min-width: 9em; } .text td { overflow-wrap: anywhere; } .text th { vertical-align: top; }
pre { overflow-x: auto; background: #f0f2f5; padding: 12px; border-radius: 6px; font-size: .85rem; }
@media (max-width: 600px) { .text tr, .text th, .text td { display: block; border: 0; padding: 2px 0; }
  .text tr { padding: 8px 0; border-bottom: 1px solid #e1e5ea; } section { padding: 12px 10px; } }
@media print { body { background: #fff; } section { break-inside: avoid; } }
"""


def write_report(folder: Path, out: Path) -> Path:
    """Write the report of a folder.

    Args:
        folder: where the demo, `simulate`, `run` and `tune` left their files; any may be missing.
        out: the HTML file to write.

    Returns:
        `out`.

    Raises:
        StudioError: there is no such folder, or `out` cannot be written.
    """
    write_text_atomic(Path(out), report_html(Workspace(folder).read()))
    return Path(out)


def report_html(snapshot: Snapshot) -> str:
    """The report as one HTML text."""
    comparison = views.compare(snapshot.runs)
    terms = views.tpot_terms(snapshot.runs)
    load = views.expert_load(snapshot.trace)
    tuned = snapshot.tuned
    sections = [
        _problems(snapshot.problems),
        _cards(summary.summary_cards(snapshot)),
        section(
            "Predicted against measured",
            " ".join(comparison.sentences),
            figure_html(figures.predicted_against_measured(comparison), "comparison") + _comparison_table(comparison),
        ),
        section("What a token's time is made of", terms.sentence, figure_html(figures.tpot_terms(terms), "terms")),
        section("Which experts the tokens went to", load.sentence, figure_html(figures.load_heat_map(load), "load")),
        *routing_sections(snapshot),
        *_timelines(snapshot),
        *validation_sections(snapshot),
        section("Tuned configuration", "" if tuned else views.NO_TUNED, _code(tuned.text if tuned else None)),
        section("Where these numbers come from", "", _provenance(snapshot)),
    ]
    return _document("\n".join(part for part in sections if part), any(run.run.info.emulated for run in snapshot.runs))


def _document(body: str, emulated: bool) -> str:
    badge = f'<p><span class="badge">{EMULATED}</span> {EMULATED_NOTE}</p>'
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{TITLE}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<link rel="icon" href="data:,"><style>{_STYLE}</style><script>{get_plotlyjs()}</script></head>'
        f"<body><main><header><h1>{TITLE}</h1>{badge if emulated else ''}</header>\n{body}\n</main></body></html>\n"
    )


def _problems(problems: tuple[str, ...]) -> str:
    if not problems:
        return ""
    lines = "".join(f'<p class="problem">{escape(line)}</p>' for line in problems)
    return f"<section><h2>Files that could not be read</h2>{lines}</section>"


def _cards(cards: tuple[summary.Card, ...]) -> str:
    return f'<div class="cards">{"".join(_card(card) for card in cards)}</div>'


def _card(card: summary.Card) -> str:
    badge = f' <span class="badge">{escape(card.badge)}</span>' if card.badge else ""
    return (
        f'<div><div class="muted">{escape(card.title)}{badge}</div><div class="value">{escape(card.value)}</div>'
        f'<div class="muted">{escape(card.detail)}</div></div>'
    )


def _comparison_table(comparison: views.Comparison) -> str:
    if not comparison.rows:
        return ""
    groups = "".join(
        f'<th colspan="{len(names)}" scope="colgroup">{escape(group)}</th>' for group, names in COLUMN_GROUPS
    )
    names = "".join(f'<th scope="col">{escape(name)}</th>' for _, group in COLUMN_GROUPS for name in group)
    body = "".join(f"<tr>{''.join(_cell(cell) for cell in cells(row))}</tr>" for row in comparison.rows)
    return (
        f'<div class="scroll"><table id="comparison"><thead><tr>{groups}</tr><tr>{names}</tr></thead>'
        f'<tbody>{body}</tbody></table></div><p class="muted">{escape(TABLE_NOTE)}</p>'
    )


def _cell(cell: Cell) -> str:
    value = "" if cell.value is None else f' data-value="{cell.value!r}"'
    remark = f'<br><span class="muted">{escape(cell.remark)}</span>' if cell.remark else ""
    return f"<td{value}>{escape(cell.text)}{remark}</td>"


def _timelines(snapshot: Snapshot) -> list[str]:
    """The same passes of one strategy, measured and predicted, one below the other."""
    chosen = timeline_runs(snapshot)
    if not chosen:
        view = timeline(snapshot.runs[0] if snapshot.runs else None, 0, 0)
        return [section("Timeline", "", figure_html(timeline_figure.timeline(view), "timeline-0"))]
    first, last = default_window(chosen[0])
    parts = []
    for place, item in enumerate(chosen):
        view = timeline(item, first, last)
        heading = f"Timeline: {view.title}, passes {view.first} to {view.last}"
        parts.append(section(heading, view.sentence, figure_html(timeline_figure.timeline(view), f"timeline-{place}")))
    return parts


def timeline_runs(snapshot: Snapshot) -> list[NamedRun]:
    """The fastest run with a timeline, and its counterpart of the same label if that has one too."""
    found = runs_with_spans(snapshot.runs)
    if not found:
        return []
    best = found[0]
    for _, predicted, measured in views.pair_runs(snapshot.runs):
        pair = [item for item in (measured, predicted) if item is not None and item.run.spans]
        if best in pair:
            return pair
    return [best]


def _code(text: str | None) -> str:
    return f"<pre><code>{escape(text)}</code></pre>" if text else ""


def _provenance(snapshot: Snapshot) -> str:
    rows = []
    for item in snapshot.runs:
        info = item.run.info
        versions = ", ".join(f"{name} {version}" for name, version in info.versions.items())
        details = [
            f"{info.kind}{', ' + EMULATED if info.emulated else ''}; model {info.model}; hardware {info.hardware}",
            f"trace {info.trace_digest or 'not named'}; profile {info.hardware_digest or 'not named'}",
            f"versions: {versions or 'not named'}",
            *info.notes,
        ]
        rows.append((f"{item.name}{RUN_SUFFIX}", "\n".join(details)))
    names = [f"{item.name}{RUN_SUFFIX}" for item in snapshot.runs] + [TRACE_NAME, HARDWARE_NAME, TUNED_NAME]
    files = [(name, file_digest(snapshot.folder / name)) for name in names if (snapshot.folder / name).is_file()]
    written = ", ".join(f"{name} {version}" for name, version in software_versions("plotly", "numpy").items())
    body = "".join(_row(name, text) for name, text in (*rows, *files, ("this report", written)))
    return f'<table class="text"><tbody>{body}</tbody></table>'


def _row(name: str, text: str) -> str:
    lines = "<br>".join(escape(line) for line in text.splitlines())
    return f'<tr><th scope="row">{escape(name)}</th><td>{lines}</td></tr>'
