"""Where the files that ship with the project lie: in a checkout beside the packages, in a wheel inside this one."""

from __future__ import annotations

from pathlib import Path


def sample_folder() -> Path:
    """The folder with the demo model, sample traces and hardware profiles."""
    package = Path(__file__).resolve().parent
    checkout = package.parent / "traces"
    return checkout if (checkout / "README.md").is_file() else package / "samples"
