"""What surrounds every page: header, navigation, the place for content and for errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dash_mantine_components as dmc
from dash import ClientsideFunction, Dash, Input, Output, State, dcc, html

from dashboard.theme import FONT

if TYPE_CHECKING:
    from dashboard.app import Page

TITLE = "MoE Offload Studio"
NAVBAR = {"width": 184, "breakpoint": "sm", "collapsed": {"mobile": True}}
SWITCH_LABEL = "Switch between light and dark"


def shell(folder: Path, pages: Sequence[Page]) -> Any:
    """The layout of the application."""
    links = [
        dmc.NavLink(label=page.title, href=page.path, id=_link_id(page), className="nav-link", variant="filled")
        for page in pages
    ]
    content = html.Div(
        [html.Div(id="shell-error", role="alert"), html.Div(id="page", className="page", tabIndex=-1)], className="main"
    )
    return dmc.MantineProvider(
        [
            dcc.Location(id="location", refresh=False),
            dcc.Store(id="view"),
            dcc.Store(id="scheme"),
            dcc.Store(id="scheme-turned"),
            dcc.Store(
                id="shell-pages",
                data=[{"path": page.path, "title": page.title, "link": _link_id(page)} for page in pages],
            ),
            html.A("Skip to content", href="#page", className="skip-link"),
            dmc.AppShell(
                [
                    _header(folder),
                    dmc.AppShellNavbar(
                        html.Nav(links, **{"aria-label": "Pages"}), id="shell-navbar", className="navbar navbar-closed"
                    ),
                    dmc.AppShellMain(content),
                ],
                id="shell",
                header={"height": 56},
                navbar=NAVBAR,
                padding="md",
                transitionDuration=0,
            ),
        ],
        id="theme",
        theme={"fontFamily": FONT, "primaryColor": "blue", "defaultRadius": "md"},
    )


def _header(folder: Path) -> Any:
    """The program's name, the folder's, and the switch between light and dark."""
    return dmc.AppShellHeader(
        [
            dmc.Burger(id="shell-menu", opened=False, hiddenFrom="sm", size="sm", **{"aria-label": "Pages"}),
            html.Div(
                [
                    html.Div(TITLE, className="brand-name"),
                    html.Div(folder.name or str(folder), className="folder", title=str(folder)),
                ],
                className="brand",
            ),
            html.Button(
                "◐", id="scheme-switch", className="scheme-switch", title=SWITCH_LABEL, **{"aria-label": SWITCH_LABEL}
            ),
        ],
        className="header",
    )


def register_shell(app: Dash, pages: Sequence[Page]) -> None:
    """Connect address, navigation, menu and scheme; all of it runs in the browser."""
    path, search = Input("location", "pathname"), Input("location", "search")
    app.clientside_callback(ClientsideFunction("studio", "view"), Output("view", "data"), path, search)
    app.clientside_callback(ClientsideFunction("studio", "scheme"), Output("scheme", "data"), search)
    app.clientside_callback("scheme => scheme || 'light'", Output("theme", "forceColorScheme"), Input("scheme", "data"))
    app.clientside_callback(
        ClientsideFunction("studio", "turn"),
        Output("scheme-turned", "data"),
        Input("scheme-switch", "n_clicks"),
        State("scheme", "data"),
        prevent_initial_call=True,
    )
    app.clientside_callback(
        ClientsideFunction("studio", "navigation"),
        [Output(_link_id(page), prop) for prop in ("href", "active") for page in pages],
        path,
        search,
        State("shell-pages", "data"),
    )
    app.clientside_callback(
        ClientsideFunction("studio", "menu"),
        Output("shell", "navbar"),
        Output("shell-menu", "opened"),
        Output("shell-navbar", "className"),
        Input("shell-menu", "opened"),
        path,
        State("shell", "navbar"),
        prevent_initial_call=True,
    )


def error_alert(text: str) -> Any:
    """What is shown above a page when a callback failed."""
    return dmc.Alert(text, title="This did not work", color="orange", withCloseButton=True, className="problem")


def _link_id(page: Page) -> str:
    return f"shell-link-{page.title.lower().replace(' ', '-')}"
