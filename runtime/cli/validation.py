"""The verb that holds predictions against measurements: validate."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runtime.cli.app import Json, app, console, needs_live, progress_bar, quiet_threads, say, say_json, say_next
from runtime.cli.traces import Model, PromptFile, Seed

if TYPE_CHECKING:
    from runtime.pairing import Comparison
    from runtime.validation import LiveValidation
    from simulator.validation.papers import PapersValidation
    from simulator.validation.published import PublishedValidation
    from trace_capture.hardware import HardwareProfile


@app.command("validate")
def validate_command(
    live: Annotated[bool, typer.Option("--live", help="Against the live engine, on this machine.")] = False,
    published: Annotated[
        Path | None, typer.Option("--published", help="Against a table of published measurements (CSV).")
    ] = None,
    pairs: Annotated[
        Path | None, typer.Option("--pairs", help="With --published: a table of which row is faster (CSV).")
    ] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="With --published: take efficiencies and bands from this table itself.")
    ] = False,
    papers: Annotated[bool, typer.Option("--papers", help="Against the figures of the papers.")] = False,
    model: Model = "demo",
    hardware: Annotated[
        str | None, typer.Option("--hardware", help="With --live: a profile made by calibrate, instead of calibrating.")
    ] = None,
    prompts: PromptFile = None,
    repeats: Annotated[int, typer.Option(min=1, help="With --live: runs of each combination.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="With --live: new tokens per prompt.")] = 24,
    seed: Seed = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File for the record (JSON), with --papers for the table (Markdown)."),
    ] = None,
    save_hardware: Annotated[
        Path | None, typer.Option(help="With --live: file for the profile, with the error band that was found.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Hold predictions against measurements, and write the record that error bands come from.

    Example: moe-studio validate --live --out record.json --save-hardware hardware.toml
    Example: moe-studio validate --published published.csv --pairs pairs.csv
    Example: moe-studio validate --papers --json
    """
    from trace_capture.errors import StudioError

    mode = _one_mode({"--live": live, "--published": published is not None, "--papers": papers})
    if papers:
        _run_papers(out, as_json)
    if published is None and (pairs is not None or fit):
        raise StudioError("--pairs and --fit go with --published; give the table of measurements too")
    if published is not None:
        _run_published(published, pairs, fit, out, as_json)
    if mode == "--live":
        result = _run_live(model, hardware, prompts, repeats, max_new_tokens, seed, not as_json)
        if out is not None:
            result.record.save(out)
        if save_hardware is not None:
            result.hardware.save(save_hardware)
        if as_json:
            say_json(_live_json(result))
        else:
            _say_live(result, out, save_hardware)
        if result.counts_wrong:
            sys.exit(1)


def _one_mode(given: dict[str, bool]) -> str:
    """The one option among `given` that was asked for.

    Raises:
        StudioError: none or several.
    """
    from trace_capture.errors import StudioError

    chosen = [name for name, is_given in given.items() if is_given]
    if len(chosen) != 1:
        found = f"both {' and '.join(chosen)}" if chosen else "none"
        raise StudioError(f"say what to validate against with exactly one of {', '.join(given)}; got {found}")
    return chosen[0]


def _run_published(published: Path, pairs: Path | None, fit: bool, out: Path | None, as_json: bool) -> None:
    from simulator.validation.published import fit_published, validate_published
    from trace_capture.errors import StudioError

    if out is not None and not fit:
        raise StudioError("--out with --published writes the record of the table, which --fit makes; add --fit")
    record = None
    if fit:
        record = fit_published(published, f"moe-studio validate --published {published.name} --fit --out {out}")
        if out is not None:
            record.save(out)
    with progress_bar(not as_json) as step:
        result = validate_published(published, pairs, record=record, progress=step("predict rows"))
    if as_json:
        say_json(result.as_json())
    else:
        _say_published(result)


def _say_published(result: PublishedValidation) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    values = result.as_json()
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("strategy", "rows", "median error", "90th percentile", "inside band"):
        table.add_column(title, justify="left" if title == "strategy" else "right", no_wrap=True)
    groups = values["by_strategy"] | {"all that count": values["overall"], "all predicted": values["all_predicted"]}
    for name, entry in groups.items():
        if entry["rows"]:
            shares = (entry["median_abs_error"], entry["p90_abs_error"], entry["band_coverage"])
            table.add_row(name.replace("_", " "), str(entry["rows"]), *(f"{100 * share:.0f} %" for share in shares))
    say("Decode rates predicted from data sheets, against published measurements by others (errors of |ln ratio|).")
    console().print(table)
    unseen, covered = values["leave_group_out"], values["leave_group_out"]["band_coverage"]
    if unseen["rows"]:
        say(
            f"without the row's own source: median {100 * unseen['median_abs_error']:.0f} %, "
            f"90th percentile {100 * unseen['p90_abs_error']:.0f} %"
            + (f", inside a band made without it {100 * covered:.0f} %" if covered is not None else "")
        )
    if values["ranking_pairs"]:
        say(f"order of strong pairs right: {100 * values['ranking_accuracy']:.1f} % of {values['ranking_pairs']}")
    for reason, count in values["skip_reasons"].items():
        say(f"  {count} without a prediction: {reason}")
    for reason, count in values["ranking_only_reasons"].items():
        say(f"  {count} ranked only: {reason}")
    say_next("moe-studio validate --published CSV --pairs CSV --json, for every row with its terms")


def _run_papers(out: Path | None, as_json: bool) -> None:
    """Show the rows; exit code 1 when one whose measurement is not in doubt is missed."""
    from simulator.validation.papers import markdown, validate_papers
    from trace_capture.files import write_text_atomic

    with progress_bar(not as_json) as step:
        result = validate_papers(step("predict figures"))
    if out is not None:
        write_text_atomic(out, markdown(result))
    if as_json:
        say_json(result.as_json())
    else:
        _say_papers(result, out)
    if result.missed:
        sys.exit(1)


def _say_papers(result: PapersValidation, out: Path | None) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("id", "scenario", "unit", "predicted", "measured", "+-", "ok"):
        table.add_column(title, justify="left" if title in ("id", "scenario", "unit") else "right")
    for row in result.rows:
        numbers = (f"{value:.2f}" for value in (row.predicted, row.measured, row.tolerance))
        verdict = ("yes" if row.ok else "NO") + (" (soft)" if row.soft else "")
        table.add_row(row.id, row.scenario, row.unit, *numbers, verdict)
    console().print(table)
    for note in result.notes:
        say(note)
    for name, reason in result.skipped:
        say(f"  {name} is not predicted: {reason}")
    if out is not None:
        say(f"wrote {out}")
    say_next("moe-studio validate --papers --json, for every row with its details")


def _run_live(
    model: str, hardware: str | None, prompts: Path | None, repeats: int, max_new_tokens: int, seed: int, shown: bool
) -> LiveValidation:
    with needs_live():
        from runtime.models import load_model, read_prompts
        from runtime.validation import validate_live
    from trace_capture.hardware import HardwareProfile
    from trace_capture.samples import sample_folder

    quiet_threads()
    profile: HardwareProfile | None = HardwareProfile.load(Path(hardware)) if hardware is not None else None
    with progress_bar(shown) as step:
        return validate_live(
            load_model(model),
            read_prompts(prompts or sample_folder() / "demo_prompts.txt", ()),
            command=f"moe-studio validate --live --model {model} --repeats {repeats} --max-new-tokens {max_new_tokens}",
            step=step,
            hardware=profile,
            repeats=repeats,
            max_new_tokens=max_new_tokens,
            seed=seed,
        )


def _live_json(result: LiveValidation) -> dict[str, Any]:
    from statistics import median

    rows = [pair.model_dump() for pair in result.record.pairs]
    return {
        "combinations": [row | row.pop("details") for row in rows],
        "median_abs_tpot_error": median(result.errors),
        "worst_abs_tpot_error": max(result.errors),
        "median_abs_run_error": median(result.run_errors),
        "worst_abs_run_error": max(result.run_errors),
        "aims_met": result.aims_met,
        "counts_equal": not result.counts_wrong,
        "error_band": result.record.band("any").model_dump(),
        "hardware": result.hardware.name,
        "emulated": result.hardware.emulated,
        "model": result.record.model,
    }


def _say_live(result: LiveValidation, out: Path | None, save_hardware: Path | None) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    titles = ("combination", "predicted", "measured", "error", "at speed", "slower", "TTFT", "hits", "counts")
    for title in titles:
        is_name = title == "combination"  # wraps, so that no number is cut where the screen is narrow
        table.add_column(title, justify="left" if is_name else "right", no_wrap=not is_name)
    for comparison in result.comparisons:
        table.add_row(*_cells(comparison))
    repeats = len(result.comparisons[0].measured)
    over = " over an emulated link" if result.hardware.emulated else ""
    say(f"Milliseconds per output token of {result.record.model} on {result.hardware.name}: predicted by replay of the")
    say(f"same tokens, and measured on the live engine{over} ({repeats} interleaved runs, their median).")
    screen = console()
    screen.width = max(screen.width, 112)  # a file has no width, and the table would lose its numbers
    screen.print(table)
    say("at speed: error of the prediction for the speed that the machine had, told by fixed work timed before every")
    say("pass (slower: its time over that in calibration); of every pass the median run, then the mean over passes.")
    _say_verdict(result)
    if out is not None:
        say(f"wrote {out}: every pair with its parts and counts")
    if save_hardware is not None:
        say_next(f"moe-studio simulate TRACE --hardware {save_hardware}")
    else:
        say_next("moe-studio validate --live --save-hardware hardware.toml, for predictions with this band")


def _say_verdict(result: LiveValidation) -> None:
    from statistics import median

    from runtime.validation import MEDIAN_AIM, WORST_AIM

    verdict = "as aimed for" if result.aims_met else "MISSED"
    aims = f"aims: {100 * MEDIAN_AIM:.0f} % and {100 * WORST_AIM:.0f} %, {verdict}"
    at_speed = f"median {100 * median(result.errors):.1f} %, worst {100 * max(result.errors):.1f} %"
    as_run = f"median {100 * median(result.run_errors):.1f} %, worst {100 * max(result.run_errors):.1f} %"
    say(f"absolute error of TPOT at speed: {at_speed} ({aims}); of the runs as they were: {as_run}")
    exact = sum(comparison.is_free_of_races for comparison in result.comparisons)
    wrong = result.counts_wrong
    say(f"hits, loads, evictions and bytes where no race decides: equal in {exact - len(wrong)} of {exact}")
    for comparison in wrong:
        say(f"  DIFFERENT: {comparison.predicted.info.label}: {comparison.count_differences()}")
    say(f"band of further predictions, from the runs as they were: {result.record.band('any').text()}")


def _cells(comparison: Comparison) -> list[str]:
    predicted, measured = comparison.predicted.metrics, comparison.measured[0].metrics
    counts = "race" if not comparison.is_free_of_races else "DIFFERENT" if comparison.count_differences() else "equal"
    return [
        comparison.predicted.info.label,
        f"{predicted.tpot_ms:.2f}",
        f"{comparison.run_tpot_ms:.2f}",
        f"{100 * comparison.run_error_ratio:+.1f} %",
        f"{100 * comparison.error_ratio:+.1f} %",
        f"{comparison.slowdown.mean():.2f}x",
        f"{100 * comparison.ttft_error_ratio:+.1f} %",
        f"{100 * predicted.decode_hit_rate:.0f}/{100 * measured.decode_hit_rate:.0f} %",
        counts,
    ]
