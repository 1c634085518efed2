"""The export page in a real Chromium: numbers, files and refusals against the library's own."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dashboard.data import Workspace
from dashboard.export_view import Wanted, headline, make_export
from simulator.config_file import load_config
from simulator.exports import export
from trace_capture.hardware import HardwareProfile
from trace_capture.trace import Trace

pytestmark = pytest.mark.browser

Visit = Callable[..., object]
MACHINE = "rtx4090-pcie4x16"


def test_the_page_says_what_the_library_says(visit, address: str, folder: Path) -> None:
    made = make_export(Workspace(folder).read(), Wanted("tuned.toml", "llama.cpp", "trace.parquet", MACHINE))
    assert made.predicted.tpot_ms is not None and made.lost
    place = f"{address}/export?config=tuned.toml&target=llama.cpp&trace=trace.parquet&hardware={MACHINE}"
    with visit(place, "#export-predicted") as page:
        value = page.locator("#export-predicted")
        assert value.inner_text() == headline(made.predicted)
        assert float(value.get_attribute("data-value")) == made.predicted.tpot_ms
        assert page.locator("#export-command").inner_text() == made.command
        text = page.locator("#export-result").inner_text()
        assert [sentence for sentence in (*made.lost, *made.notes) if " ".join(sentence.split()) not in text] == []


def test_choices_go_to_the_address_and_files_come_out(visit, address: str, folder: Path) -> None:
    config, trace = load_config(folder / "tuned.toml"), Trace.load(folder / "trace.parquet")
    machine = HardwareProfile.load(folder / "hardware.toml")
    with visit(f"{address}/export?config=tuned.toml&target=kt&hardware=none", "#export-text-1") as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        made = export(config, "kt", trace.shape, trace=trace)
        with page.expect_download() as caught:
            page.get_by_role("button", name="Download all (zip)").click()
        assert caught.value.suggested_filename == "tuned-kt.zip"
        with zipfile.ZipFile(io.BytesIO(Path(caught.value.path()).read_bytes())) as archive:
            assert {name: archive.read(name).decode() for name in archive.namelist()} == {
                file.name: file.text for file in made.files
            }
        page.get_by_role("button", name=f"Copy {made.files[1].name}").press("Enter")
        page.wait_for_selector("text=Copied")
        assert page.evaluate("navigator.clipboard.readText()") == made.files[1].text
        page.locator("#export-target").click()
        page.get_by_role("option", name="MoE Offload Studio").click()
        page.locator("#export-hardware").click()
        page.get_by_role("option", name="hardware.toml").click()
        native = export(config, "native", trace.shape, hardware=machine, trace=trace)
        page.wait_for_selector(f"text={native.predicted.text}")
        assert "emulated link" in page.locator("#export-result").inner_text()
        with page.expect_download() as caught:
            page.get_by_role("button", name=f"Download {native.files[0].name}").press("Enter")
        assert load_config(Path(caught.value.path())) == config
        page.wait_for_function("location.search.includes('target=native') && location.search.includes('hardware.toml')")
        page.reload()
        page.wait_for_selector(f"text={native.predicted.text}")


def test_what_cannot_be_exported_says_why(visit, serving, address: str, tmp_path: Path) -> None:
    with visit(f"{address}/export?config=tuned.toml&trace=none", "#export-result [role=alert]") as page:
        assert "choose a trace of it" in page.locator("#export-result").inner_text()
    with serving(tmp_path) as empty, visit(f"{empty}/export?config=../tuned.toml", "#export-result .note") as page:
        assert "There is no configuration in this folder" in page.locator("#export-result").inner_text()
