"""What an export gives: files as text, how fast the target is expected to be, and what it cannot do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulator.exports.prediction import Prediction
from simulator.policies.config import OffloadConfig
from simulator.validation.record import Family
from trace_capture.files import make_folder, write_text_atomic


@dataclass(frozen=True)
class ExportedFile:
    """One file of an export.

    Attributes:
        name: plain file name.
        text: content.
        has_about: whether the text begins with what there is to say about the export, as comments.
    """

    name: str
    text: str
    has_about: bool = False


@dataclass(frozen=True)
class Mapping:
    """A configuration in the terms of a target, before anything is said about it.

    Attributes:
        files: in the target's formats; the first is the one that matters most. The placeholder `ABOUT` of `text`
            stands where comments go.
        command: how to start the target with them.
        flags: the flags of that command, where it has any.
        lost: what the target cannot express of the configuration, a sentence each.
        notes: what a user should know of the mapping, a sentence each.
        mapped: what the target does instead, as a configuration that can be simulated.
        not_predicted: why there is no such configuration.
        with_drafts: whether the files make the target draft as the tuner found best.
        family: which published measurements say how far such predictions are off.
    """

    files: tuple[ExportedFile, ...]
    command: str = ""
    flags: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    mapped: OffloadConfig | None = None
    not_predicted: str = ""
    with_drafts: bool = False
    family: Family = "any"


@dataclass(frozen=True)
class Export:
    """An exported configuration.

    Attributes:
        target: name of the target.
        title: how the target is called.
        engine: its version that the files are written for, and how to check it.
        files: names and content; nothing is written yet.
        about: the head comment, a line each.
        command, flags, lost, notes: see `Mapping`.
        configured: what was predicted for the configuration in this project's engine.
        predicted: what the target is predicted to do with these files.
    """

    target: str
    title: str
    engine: str
    files: tuple[ExportedFile, ...]
    about: tuple[str, ...]
    command: str
    flags: tuple[str, ...]
    lost: tuple[str, ...]
    notes: tuple[str, ...]
    configured: Prediction
    predicted: Prediction

    def write(self, place: Path, is_folder: bool) -> list[Path]:
        """Write the files, each atomically.

        Args:
            place: a folder, or the file that the first one becomes; the others then lie beside it.
            is_folder: which of the two.

        Raises:
            StudioError: the place cannot be written to.
        """
        folder = place if is_folder else place.parent
        make_folder(folder)
        paths = [folder / file.name for file in self.files]
        if not is_folder:
            paths[0] = place
        for path, file in zip(paths, self.files, strict=True):
            write_text_atomic(path, file.text)
        return paths

    def as_json(self) -> dict[str, Any]:
        """For programs; without the files' text."""
        return {
            "target": self.target,
            "engine": self.engine,
            "about": list(self.about),
            "command": self.command,
            "flags": list(self.flags),
            "not_expressed": list(self.lost),
            "notes": list(self.notes),
            "configured": self.configured.as_json(),
            "predicted": self.predicted.as_json(),
        }
