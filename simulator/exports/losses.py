"""Sentences about what another engine does not do: one wording for all targets."""

from __future__ import annotations

from simulator.exports.source import ExportSource
from simulator.policies.prefetch import make_prefetch_policy


def lost_cache(source: ExportSource, engine: str, instead: str) -> list[str]:
    """For engines without an expert cache: slots and eviction have no counterpart."""
    cache = source.config.cache
    if cache.policy == "resident" or not source.budget_bytes:
        return []
    where = "one pool for all layers" if cache.scope == "global" else "slots of each layer's own"
    return [f"the expert cache ({cache.policy}, {where}) is lost: {engine} knows only placement, and {instead}"]


def lost_prefetch(source: ExportSource, engine: str) -> list[str]:
    """For engines that load nothing ahead of the router in decode."""
    prefetch = source.config.prefetch
    if prefetch.source == "none":
        return []
    lost = [f"prefetch from '{prefetch.source}' is lost: {engine} loads no expert ahead of the router in decode"]
    modes = {prefetch.mode} if isinstance(prefetch.mode, str) else set(prefetch.mode)
    if modes - {"hint"} and make_prefetch_policy(prefetch.source).prediction is not None:
        what = "speculative execution of predicted experts (commit)" if "commit" in modes else "the mode verify"
        lost.append(f"{what} is lost with it")
    return lost


def lost_cpu_rule(source: ExportSource, engine: str, instead: str) -> list[str]:
    """For engines whose CPU runs what is placed there, whoever asks."""
    cpu = source.config.cpu
    if cpu.policy == "none":
        return []
    return [f"the CPU's rule '{cpu.policy}' is lost: {engine} does not decide per pass, and {instead}"]


def lost_prefill(source: ExportSource, engine: str, instead: str) -> list[str]:
    """For engines that stream no experts while a prompt is read, or cannot be told to."""
    if source.config.prefill.strategy == "on-demand":
        return []
    return [f"streaming of prompts' experts is not settable in {engine}: {instead}"]


def lost_draft(source: ExportSource, engine: str) -> list[str]:
    """For targets without flags for speculative decoding."""
    if source.draft is None:
        return []
    return [
        f"speculative decoding with {source.draft.gamma} drafts is not part of this export: {engine} has flags of its "
        "own for it, which depend on the draft"
    ]
