"""The application without a browser: routes, callbacks, addresses, the server."""

from __future__ import annotations

import ast
import json
import logging
import shutil
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import dashboard
from dashboard.app import PAGES, create_app, render_page
from dashboard.data import Workspace
from dashboard.pages import routing, timeline
from dashboard.server import bind_server, serve
from trace_capture.errors import StudioError


def text_of(component: object) -> str:
    """A layout as JSON, to look for texts in."""
    return json.dumps(component, default=lambda item: item.to_plotly_json(), ensure_ascii=False)


def test_two_apps_do_not_share_callbacks(folder: Path, tmp_path: Path) -> None:
    first, second = create_app(folder), create_app(tmp_path)
    first._setup_server()
    second._setup_server()
    assert len(first.callback_map) == len(second.callback_map) > 5
    assert first.callback_map is not second.callback_map


def test_every_page_renders_for_a_full_and_an_empty_folder(folder: Path, tmp_path: Path) -> None:
    for place in (folder, tmp_path):
        for page in PAGES:
            assert text_of(
                render_page(Workspace(place).read(), page.path, "?run=nonsense&passes=x,-1&layer=-1&phase=?")
            )


def test_an_unknown_address_says_so(folder: Path) -> None:
    assert "no page /x" in text_of(render_page(Workspace(folder).read(), "/x", ""))


def values_of(page: list[object]) -> dict[str, object]:
    """Values of a page's controls by their ids."""
    found = {}
    for part in page:
        for item in getattr(part, "_traverse", list)():
            if isinstance(getattr(item, "id", None), str) and hasattr(item, "value"):
                found[item.id] = item.value
    return found


def test_the_address_sets_the_controls(folder: Path) -> None:
    snapshot = Workspace(folder).read()
    values = values_of(render_page(snapshot, "/timeline", "?run=lru-predicted&passes=5,900"))
    assert (values[timeline.RUN], values[timeline.PASSES]) == ("lru-predicted", [5, 30])
    values = values_of(render_page(snapshot, "/routing", "?trace=trace.parquet&layer=3&phase=decode"))
    assert (values[routing.TRACE], values[routing.LAYER], values[routing.PHASE]) == ("trace.parquet", "3", "decode")


@pytest.mark.parametrize("name", ["../secret.parquet", "/etc/passwd", "..%2Fsecret.parquet", "absent.parquet"])
def test_an_address_names_files_of_the_folder_alone(folder: Path, name: str) -> None:
    shutil.copy(folder / "trace.parquet", folder.parent / "secret.parquet")
    values = values_of(render_page(Workspace(folder).read(), "/routing", f"?trace={name}"))
    assert values[routing.TRACE] == "trace.parquet"


def test_an_empty_folder_says_what_to_do(tmp_path: Path) -> None:
    text = text_of(render_page(Workspace(tmp_path).read(), "/", ""))
    assert "moe-studio tune" in text
    assert "no run with a timeline" in text_of(render_page(Workspace(tmp_path).read(), "/timeline", ""))


def test_a_damaged_run_is_shown_as_text(tmp_path: Path) -> None:
    (tmp_path / "bad.run.json").write_text("{", encoding="utf-8")
    text = text_of(render_page(Workspace(tmp_path).read(), "/", ""))
    assert "bad.run.json is not a run record" in text and "Traceback" not in text


def test_a_taken_port_is_a_clear_error(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StudioError, match=rf"cannot bind 127.0.0.1:{port}: .*; choose another --port"):
            bind_server(folder, port=port)


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70_000), ("no.such.host.invalid", 0), ("192.0.2.1", 0)])
def test_an_impossible_address_is_a_clear_error(folder: Path, host: str, port: int) -> None:
    with pytest.raises(StudioError, match="cannot bind"):
        bind_server(folder, host=host, port=port)


def test_serve_says_where_to_look_and_stops_on_interrupt(folder: Path) -> None:
    lines: list[str] = []

    def interrupt(line: str) -> None:
        lines.append(line)
        raise KeyboardInterrupt

    serve(folder, port=0, announce=interrupt)
    assert lines[0].startswith(f"showing {folder} on http://127.0.0.1:")


def test_binding_elsewhere_is_warned_about(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        bind_server(folder, port=0).server_close()
        assert caplog.text == ""
        bind_server(folder, host="0.0.0.0", port=0).server_close()
    assert "everyone who can reach this machine" in caplog.text


def test_the_server_answers_with_local_resources_alone(folder: Path) -> None:
    server = bind_server(folder, port=0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/", timeout=20) as answer:
            html = answer.read().decode()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert "http://" not in html and "https://" not in html and '<html lang="en">' in html


def test_a_foreign_name_for_this_machine_is_refused(serving, folder: Path) -> None:
    """DNS rebinding: a web site whose name was made to point here must not read or write the folder."""
    with serving(folder) as address:
        port = address.rpartition(":")[2]
        for name, status in (("evil.example", 403), (f"evil.example:{port}", 403), (f"localhost:{port}", 200)):
            request = urllib.request.Request(address, headers={"Host": name})
            try:
                with urllib.request.urlopen(request, timeout=20) as answer:
                    assert answer.status == status
            except urllib.error.HTTPError as error:
                assert error.code == status and b"answers to 127.0.0.1" in error.read()
                error.close()


def test_public_names_load_when_asked_for() -> None:
    assert sorted(dashboard.__all__) == ["create_app", "serve", "write_report"]
    assert all(callable(getattr(dashboard, name)) for name in dashboard.__all__)
    with pytest.raises(AttributeError):
        dashboard.nothing  # noqa: B018


def test_importing_the_room_is_light_and_never_opens_the_engine() -> None:
    code = "import sys, dashboard; assert 'dash' not in sys.modules; import dashboard.app, dashboard.report; "
    code += "assert not {'torch', 'transformers', 'runtime'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(dashboard.__file__).parent.parent)


def test_no_module_of_the_room_names_the_engine() -> None:
    for path in Path(dashboard.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in names if name.split(".")[0] in ("torch", "transformers", "runtime")], path
