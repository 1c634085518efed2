"""The project's own TOML, with what the others say in comments."""

from __future__ import annotations

from simulator.config_file import config_text
from simulator.exports.commands import ABOUT
from simulator.exports.result import ExportedFile, Mapping
from simulator.exports.source import ExportSource


def to_native(source: ExportSource) -> Mapping:
    """`moe-studio run --config` takes it; nothing is lost."""
    text = config_text(source.config, "tuned.toml").split("\n\n", 1)
    model = source.options.model_path or "MODEL"
    return Mapping(
        files=(ExportedFile("tuned.toml", f"{text[0]}\n{ABOUT}\n\n{text[1]}", has_about=True),),
        command=f"moe-studio run --model {model} --config tuned.toml",
        not_predicted="it is the configuration itself",
    )
