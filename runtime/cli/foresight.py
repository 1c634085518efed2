"""What `inspect --information` says: how much speculative counts tell, and how well they foresee hot experts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.cli.app import say
from runtime.cli.draft_options import with_drafts

if TYPE_CHECKING:
    from trace_capture.trace import Trace


def foresight(trace: Trace, drafts: int | None, acceptance: float) -> dict[str, Any]:
    """Information for each draft length, and the quality of each signal's forecasts.

    Args:
        trace: decoded or verified tokens.
        drafts: re-window to so many per pass; None for 8, or for a trace of verify passes as it was captured.
        acceptance: share of drafts that are kept, where it is re-windowed.
    """
    from simulator.forecast import compare_signals
    from trace_capture.information import speculative_information

    captured = trace.info.draft.gamma if trace.info.draft and drafts is None else None
    gamma = captured or (8 if drafts is None else drafts)
    verified = trace if captured else with_drafts(trace, gamma, acceptance)
    capacity = max(trace.shape.top_k, trace.shape.num_experts // 4)
    qualities = {str(hot): compare_signals(verified, gamma, capacity, hot) for hot in (1, 2, 3)}
    return {
        "information": [row._asdict() for row in speculative_information(trace)],
        "forecast": {
            "gamma": gamma,
            "acceptance_ratio": None if captured else acceptance,
            "by_hot_frequency": {
                hot: {name: vars(quality) | {"f1_ratio": quality.f1_ratio} for name, quality in signals.items()}
                for hot, signals in qualities.items()
            },
        },
    }


def save_figure(facts: dict[str, Any], model: str, path: Path) -> None:
    """The information as a page of its own."""
    import plotly.io

    from dashboard.information_figure import information_figure
    from trace_capture.files import write_text_atomic
    from trace_capture.information import Information

    figure = information_figure([Information(**row) for row in facts["information"]], model)
    write_text_atomic(path, plotly.io.to_html(figure, include_plotlyjs=True, full_html=True))


def say_foresight(facts: dict[str, Any]) -> None:
    """Both tables for a person."""
    say("  what counts over G drafts + 1 tell (binomial: were tokens independent and experts alike)")
    say("   G   entropy  binomial   signal/noise  binomial   on the next token")
    for row in facts["information"]:
        say(
            f"  {row['gamma']:2d} {row['entropy_bits']:6.3f} bit {row['binomial_entropy_bits']:6.3f} bit "
            f"{row['signal_to_noise']:10.3f} {row['binomial_signal_to_noise']:11.3f} {row['foresight_bits']:13.4f} bit"
        )
    forecast = facts["forecast"]
    kind = "as captured" if forecast["acceptance_ratio"] is None else f"{forecast['acceptance_ratio']:.0%} kept"
    say(f"  hot in the next verify pass of {forecast['gamma']} drafts ({kind}), foreseen by")
    say("  used by at least   signal                     accuracy  precision  recall    F1")
    for hot, signals in forecast["by_hot_frequency"].items():
        for name, quality in signals.items():
            say(
                f"  {hot:>9s} tokens   {name:26s} {_percent(quality['accuracy_ratio'])}  "
                f"{_percent(quality['precision_ratio'])} {_percent(quality['recall_ratio'])}  {quality['f1_ratio']:.2f}"
            )


def _percent(ratio: float) -> str:
    return f"{100 * ratio:6.1f} %" if ratio == ratio else "    none"
