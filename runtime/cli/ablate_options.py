"""The option that takes parts of MoE-SpAc away, shared by verbs."""

from __future__ import annotations

from typing import Annotated

import typer

from simulator.ablation import ABLATIONS

Ablate = Annotated[
    str | None,
    typer.Option(
        "--ablate", help=f"Take parts of MoE-SpAc away: {', '.join(ABLATIONS)}; several by commas. Drafts: no --draft."
    ),
]
