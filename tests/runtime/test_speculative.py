"""Speculative decoding leaves greedy output as it is, and what is recorded of it is what plain decoding would say."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from runtime.capture import capture
from runtime.measure import measure
from runtime.models import GREEDY, LoadedModel, Sampling, quiet_transformers
from runtime.offloading import offloaded
from runtime.speculative import PROMPT_LOOKUP, Drafting, load_drafting, watch_drafts
from simulator.policies.config import OffloadConfig
from trace_capture.errors import ConfigError, ModelError
from trace_capture.trace import Phase, Trace

PROMPT = "the night was dark and the road was"
GAMMA = 4


def half_right(model: torch.nn.Module) -> torch.nn.Module:
    """A draft model that is often, and not always, right: the model itself with its experts' outputs disturbed."""
    draft = copy.deepcopy(model)
    torch.manual_seed(1)
    for name, parameter in draft.named_parameters():
        if "experts" in name:
            parameter.data += 0.02 * torch.randn_like(parameter)
    return draft


def draftings(model: torch.nn.Module) -> dict[str, Drafting]:
    return {"model": Drafting("draft", GAMMA, half_right(model)), "n-gram": Drafting(PROMPT_LOOKUP, GAMMA)}


class Diary:
    """A listener that writes down what it is told."""

    def __init__(self) -> None:
        self.rounds: list[tuple[str, int]] = []

    def drafting_begins(self, reads_prompt: bool) -> None:
        assert reads_prompt == (not self.rounds)
        self.rounds.append(("drafting", 0))

    def verify_begins(self, drafted: int) -> None:
        self.rounds.append(("verifying", drafted))

    def drafts_judged(self, accepted: int) -> None:
        self.rounds.append(("verified", accepted))


@pytest.mark.parametrize("kind", ["model", "n-gram"])
def test_greedy_output_is_that_of_plain_decoding_offloaded_or_not(
    any_model: torch.nn.Module, device: str, kind: str
) -> None:
    loaded = LoadedModel(any_model, _Bytes(), "tiny")
    ids = torch.tensor([[5, 9, 7, 5, 9, 7, 5, 9]], device=device)
    plain = loaded.generate(ids, 24, GREEDY, 0)
    drafting = draftings(any_model)[kind]
    diary = Diary()
    with watch_drafts(any_model, [diary]):
        assert loaded.generate(ids, 24, GREEDY, 0, drafting) == plain
    names = [name for name, _ in diary.rounds]
    assert names == ["drafting", "verifying", "verified"] * (len(names) // 3) and names
    drafted = [count for name, count in diary.rounds if name == "verifying"]
    accepted = [count for name, count in diary.rounds if name == "verified"]
    assert max(drafted) == GAMMA and all(kept <= made for kept, made in zip(accepted, drafted, strict=True))
    assert sum(accepted) + len(accepted) == 24 and drafted[0] == 0, "the first round is the prefill"
    with offloaded(any_model, OffloadConfig.for_fraction(0.5, h2d_bytes_per_s=1e9, latency_ns=0)):
        assert loaded.generate(ids, 24, GREEDY, 0, drafting) == plain


class _Bytes:
    """A tokenizer for models that have none."""

    def decode(self, ids: torch.Tensor, skip_special_tokens: bool) -> str:
        return str(ids.tolist())


@pytest.mark.parametrize("kind", ["model", "n-gram"])
def test_recorded_verify_passes_are_what_plain_decoding_records(loaded: LoadedModel, tmp_path: Path, kind: str) -> None:
    sampling = Sampling(ignore_eos=True)
    drafting = draftings(loaded.model)[kind]
    plain = capture(loaded, [PROMPT] * 2, tmp_path / "a.parquet", 30, sampling=sampling)
    trace = capture(loaded, [PROMPT] * 2, tmp_path / "b.parquet", 30, sampling=sampling, drafting=drafting)
    assert Trace.load(tmp_path / "b.parquet").info.draft == drafting.settings
    verify = [item for item in trace.passes if item.phase == Phase.VERIFY]
    kept = [int(trace.accepted[item.start : item.stop].sum()) for item in verify]
    assert verify and 1 < max(kept) <= GAMMA + 1, "some drafts were accepted"
    for item, count in zip(verify, kept, strict=True):
        assert trace.accepted[item.start : item.stop].tolist() == [True] * count + [False] * (
            item.stop - item.start - count
        )
    for sequence in (0, 1):
        truth = plain.rows(plain.sequence == sequence)
        certain = trace.rows((trace.sequence == sequence) & trace.accepted)
        length = certain.num_tokens
        assert truth.num_tokens - 1 <= length <= truth.num_tokens
        for column in ("token_id", "position", "experts"):
            assert np.array_equal(getattr(certain, column), getattr(truth, column)[:length]), column


def test_a_measured_run_counts_output_tokens_and_tells_drafting_apart(loaded: LoadedModel) -> None:
    config = OffloadConfig.for_fraction(0.5, h2d_bytes_per_s=1e9, latency_ns=0)
    drafting = draftings(loaded.model)["model"]
    run = measure(loaded, [PROMPT], config, 30, sampling=Sampling(ignore_eos=True), drafting=drafting)
    metrics = run.metrics
    assert metrics.decode_tokens == 29 and 0 < metrics.accepted_drafts < metrics.drafted_tokens
    assert sum(metrics.tpot_terms_ms.values()) == pytest.approx(metrics.tpot_ms)
    spans = [span for span in run.spans if span.kind == "drafting"]
    decode = sum(span.end_ns - span.start_ns for span in spans if span.pass_id > 0)
    assert decode / 1e6 / 29 == pytest.approx(metrics.tpot_terms_ms["drafting"]) and decode > 0
    for track in ("device", "host"):
        ends = [(span.start_ns, span.end_ns) for span in run.spans if span.track == track and span.kind != "evict"]
        assert all(before[1] <= after[0] for before, after in zip(ends, ends[1:], strict=False)), track


def test_nothing_is_left_on_the_model_when_the_block_ends(loaded: LoadedModel) -> None:
    with pytest.raises(RuntimeError, match="on purpose"), watch_drafts(loaded.model, []):
        raise RuntimeError("on purpose")
    assert "_get_candidate_generator" not in vars(loaded.model)


def test_what_cannot_draft_is_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    assert load_drafting(None, 8, loaded) is None
    with pytest.raises(ConfigError, match="gamma is 0"):
        load_drafting(PROMPT_LOOKUP, 0, loaded)
    with pytest.raises(ModelError, match="no model at"):
        load_drafting(str(tmp_path), 8, loaded)
    with pytest.raises(ModelError, match="another vocabulary"):
        load_drafting("demo", 8, loaded)


def test_a_model_whose_cache_cannot_be_rolled_back_says_so() -> None:
    with quiet_transformers():
        config = transformers.JambaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_experts=4,
            num_experts_per_tok=2,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=1,
            expert_layer_offset=0,
            mamba_d_state=8,
            use_mamba_kernels=False,
        )
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ModelError, match="cannot decode speculatively"):
        LoadedModel(model, _Bytes(), "tiny").generate(
            torch.tensor([[5, 9, 7, 5, 9]]), 8, GREEDY, 0, Drafting(PROMPT_LOOKUP, 2)
        )
