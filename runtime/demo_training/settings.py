"""What is trained and for how long: the shapes and schedules of the two presets, checked once."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from trace_capture.errors import ConfigError

VOCABULARY_SIZE = 4096


@dataclass(frozen=True, slots=True)
class NetworkShape:
    """Sizes of a Qwen3-MoE network in which every layer has experts and the embedding is tied."""

    hidden_size: int = 128
    num_layers: int = 12
    num_experts: int = 32
    top_k: int = 4
    expert_size: int = 48
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 32
    vocabulary_size: int = VOCABULARY_SIZE
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-6
    max_positions: int = 512

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise ConfigError(f"{field.name} must be positive, got {getattr(self, field.name)}")
        if self.top_k > self.num_experts:
            raise ConfigError(f"top_k {self.top_k} exceeds the {self.num_experts} experts of a layer")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """Schedule, batch and losses of one training run; together with the corpus they fix every weight."""

    num_steps: int = 2000
    batch_tokens: int = 4096
    short_context: int = 256
    long_context: int = 512
    long_context_from: float = 0.8
    warmup_steps: int = 40
    flat_until: float = 0.4
    final_rate_ratio: float = 0.03
    muon_rate: float = 0.03
    adam_rate: float = 3e-3
    balance_weight: float = 0.01
    late_balance_weight: float = 0.001
    late_balance_from: float = 0.7
    router_z_weight: float = 0.001
    teacher_ratio: float = 0.0
    teacher_from: float = 0.6
    seed: int = 20
    precision: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ConfigError(f"the number of steps must be at least 1, got {self.num_steps}; use --steps")
        for context in (self.short_context, self.long_context):
            if context < 2 or self.batch_tokens % context:
                raise ConfigError(f"a batch of {self.batch_tokens} tokens does not divide into contexts of {context}")
        if self.precision not in ("bfloat16", "float32"):
            raise ConfigError(f"precision must be bfloat16 or float32, got {self.precision!r}")
        if not 0.0 <= self.teacher_ratio <= 1.0:
            raise ConfigError(f"teacher_ratio must be within 0..1, got {self.teacher_ratio}")

    def rate_ratio(self, step: int) -> float:
        """Learning-rate factor of `step`: linear warm-up, flat, then linear down to `final_rate_ratio`."""
        warm = min(1.0, (step + 1) / max(1, min(self.warmup_steps, self.num_steps)))
        progress = step / self.num_steps
        if progress <= self.flat_until:
            return warm
        fall = (progress - self.flat_until) / (1.0 - self.flat_until)
        return warm * (1.0 - fall * (1.0 - self.final_rate_ratio))

    def balance_at(self, step: int) -> float:
        """Weight of the load-balance loss at `step`: relaxed late, so that experts may specialise."""
        return self.late_balance_weight if step >= self.late_balance_from * self.num_steps else self.balance_weight

    def teacher_ratio_at(self, step: int) -> float:
        """Share of the loss that a teacher gives at `step`: none at first, for a lesson costs twice a plain step."""
        return self.teacher_ratio if step >= self.teacher_from * self.num_steps else 0.0

    def context_at(self, step: int) -> int:
        """Tokens per training window at `step`: short at first, long for the last part."""
        return self.long_context if step >= self.long_context_from * self.num_steps else self.short_context


@dataclass(frozen=True, slots=True)
class Preset:
    """A named pair of shape and schedule."""

    shape: NetworkShape
    training: TrainingSettings


PRESETS: dict[str, Preset] = {
    "target": Preset(NetworkShape(), TrainingSettings()),
    "draft": Preset(
        NetworkShape(hidden_size=96, num_layers=2, num_experts=8, top_k=2, expert_size=96, num_heads=3, num_kv_heads=1),
        TrainingSettings(num_steps=1000, teacher_ratio=0.8),
    ),
}


def preset(name: str) -> Preset:
    """The preset called `name`.

    Raises:
        ConfigError: there is no such preset.
    """
    if name not in PRESETS:
        raise ConfigError(f"no preset {name!r}; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def as_record(value: NetworkShape | TrainingSettings) -> dict[str, Any]:
    """The settings as plain JSON values, for checkpoints and the model card."""
    return asdict(value)
