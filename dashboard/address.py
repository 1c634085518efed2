"""State of a page in its address, so that it can be shared, reloaded and gone back to.

A page reads its controls' values from the query that `layout` is given, and calls `keep_in_address` once in `register`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from dash import Dash, Input, Output, dcc

Query = dict[str, str]
"""The part of an address behind the `?`, by name."""


def address_sink(page: str) -> Any:
    """A component that `keep_in_address` needs in the layout of `page`; it shows nothing."""
    return dcc.Store(id=f"{page}-address")


def keep_in_address(app: Dash, page: str, controls: Mapping[str, tuple[str, str]]) -> None:
    """Write what controls are set to into the address whenever one changes. Lists become `1,2`; empty values go.

    Args:
        app: the application.
        page: prefix of the page's ids, as given to `address_sink`.
        controls: name in the address -> (id of the control, its property).
    """
    names = json.dumps(list(controls))
    props = json.dumps([f"{control}.{prop}" for control, prop in controls.values()])
    app.clientside_callback(
        f"(...values) => window.dash_clientside.studio.keep({names}, values, {props})",
        Output(f"{page}-address", "data"),
        *[Input(control, prop) for control, prop in controls.values()],
        prevent_initial_call=True,
    )


def one_of(text: str | None, allowed: Sequence[str], default: str | None = None) -> str | None:
    """`text` if it is allowed, else the default, else the first that is allowed."""
    if text in allowed:
        return text
    return default if default in allowed else next(iter(allowed), None)


def whole_number(text: str | None, default: int) -> int:
    """The number in an address; the default where there is none."""
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 10 else default


def number_pair(text: str | None, *, allow_equal: bool = False) -> tuple[float, float] | None:
    """Two rising numbers such as `1,2.5`, or equal ones where allowed; None where the text is none."""
    parts = (text or "").split(",")
    try:
        low, high = (float(part) for part in parts)
    except ValueError:
        return None
    rises = low < high or (allow_equal and low == high)
    return (low, high) if math.isfinite(low) and math.isfinite(high) and rises else None
