"""Hardware profiles: every number the clock of the simulator runs on, each saying where it comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tomlkit
import tomlkit.exceptions
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from trace_capture.band import ErrorBand, from_old_fields
from trace_capture.errors import ProfileError
from trace_capture.files import text_digest, write_text_atomic

PROFILE_SCHEMA_VERSION = 1

Kind = Literal["measured", "data sheet", "derived", "guess"]


class Quantity(BaseModel):
    """A number with its origin. The unit is in the name of the field that holds it."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    value: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    kind: Kind
    source: str = ""


class LinkProfile(BaseModel):
    """The path from host memory to the device (PCIe, NVLink-C2C, or an emulated link)."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    h2d_bytes_per_s: Quantity
    """Sustained rate of one large pinned copy from host to device."""
    latency_ns: Quantity
    """Time the link spends per copy beside moving bytes."""
    issue_ns: Quantity
    """Time the thread that submits a copy spends per copy."""
    wakeup_ns: Quantity
    """Time from the end of a copy until a thread that waits for it goes on."""
    pageable_bytes_per_s: Quantity | None = None
    """Sustained rate of a copy out of memory that is not pinned, which the driver stages."""
    chunk_bytes: Quantity | None = None
    """Largest single copy: a larger expert crosses in several, each with its latency and issue. None: in one."""
    host_memory: Literal["pinned", "pageable"] = "pinned"
    """Which of the two rates experts cross at."""


class HostProfile(BaseModel):
    """Memory and cores that keep the cold experts, and run them where a policy says so."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    cores: Quantity
    """Physical cores."""
    ram_bytes: Quantity
    """Memory of the host."""
    ram_bytes_per_s: Quantity
    """What all cores together read from memory in a sustained stream."""
    contended_ratio: Quantity
    """Share of `ram_bytes_per_s` that cores and copies get together while both run."""
    core_weights_per_s: Quantity
    """Weights that one core takes through dequantisation and the product with one row, as far as memory feeds it."""
    core_bytes_per_s: Quantity | None = None
    """What one core reads from memory in a stream; None: no limit of its own."""
    read_ratio: Quantity | None = None
    """Share of `ram_bytes_per_s` that kernels over experts reach; None: all of it."""
    core_flops_per_s: Quantity
    """Operations of one core in products with many rows."""
    half_rate_bytes: Quantity
    """Size of an expert at which the cores reach half of their rate: threads begin and end unevenly."""
    expert_dispatch_ns: Quantity
    """Per expert beside its weights: handing rows out to threads and waiting for the last one."""
    layer_dispatch_ns: Quantity
    """Per layer with experts on the CPU: activations to the host and back, waking threads, joining the results."""
    threads: Quantity | None = None
    """Cores that run experts; None for all."""
    decide_ns: Quantity | None = None
    """Bookkeeping of the engine per layer; None: as much as one launch on the device."""
    decide_per_load_ns: Quantity | None = None
    """Further bookkeeping per load that is planned."""


class DiskProfile(BaseModel):
    """Where experts come from that do not fit into the host's memory."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    bytes_per_s: Quantity
    """Sustained rate of reads as large as an expert."""
    latency_ns: Quantity
    """Time per read beside moving bytes."""


class DeviceProfile(BaseModel):
    """The device that runs the hot experts."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    memory_bytes: Quantity
    memory_bytes_per_s: Quantity
    flops_per_s: Quantity
    """Dense matrix throughput in the weights' precision."""
    launch_ns: Quantity
    """Cost of starting one group of kernels (a layer's attention, or its experts)."""
    read_ratio: Quantity | None = None
    """Share of `memory_bytes_per_s` that kernels reach; None: all of it."""


class DraftCosts(BaseModel):
    """What speculative decoding with one draft model costs; tables over drafts per pass, interpolated between."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: str
    """As `DraftSettings.kind`."""
    drafts: tuple[Annotated[int, Field(gt=0)], ...]
    """Drafts per pass at which the tables were measured, rising."""
    drafting_ns: tuple[float, ...]
    """Making them."""
    overhead_ns: tuple[float, ...]
    """Per verify pass beside layers and drafting: embedding, head, judging drafts, generation loop."""

    @model_validator(mode="after")
    def _tables_fit(self) -> DraftCosts:
        if not self.drafts or list(self.drafts) != sorted(set(self.drafts)):
            raise ValueError("drafts must rise and not be empty")
        if not len(self.drafts) == len(self.drafting_ns) == len(self.overhead_ns):
            raise ValueError(f"drafting_ns and overhead_ns need an entry for each of {len(self.drafts)} draft counts")
        return self

    def slowed(self, ratio: float) -> DraftCosts:
        """The same on a machine on which all of it takes `ratio` times longer."""
        tables = ("drafting_ns", "overhead_ns")
        return self.model_copy(update={name: tuple(ratio * value for value in getattr(self, name)) for name in tables})


class CpuThreadCosts(BaseModel):
    """What experts on the CPU cost with a number of threads other than one; fields as those of `MeasuredCosts`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    threads: Annotated[int, Field(gt=1)]
    cpu_experts_ns: tuple[float, ...]
    cpu_layer_ns: float = 0.0
    cpu_start_ns: float = 0.0
    cpu_split_ns: float = 0.0
    cpu_beside_ns: float = 0.0

    def slowed(self, ratio: float) -> CpuThreadCosts:
        """The same on a machine on which all of it takes `ratio` times longer."""
        names = ("cpu_layer_ns", "cpu_start_ns", "cpu_split_ns", "cpu_beside_ns")
        table = tuple(ratio * value for value in self.cpu_experts_ns)
        return self.model_copy(update={"cpu_experts_ns": table} | {name: ratio * getattr(self, name) for name in names})


class MeasuredCosts(BaseModel):
    """Compute times of one model measured on this machine; tables over tokens per pass, interpolated between."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    model: str
    tokens: tuple[Annotated[int, Field(gt=0)], ...]
    """Tokens per pass at which the tables below were measured, rising."""
    dense_ns: tuple[float, ...]
    """One layer beside its experts: attention, norms, router."""
    experts_ns: tuple[float, ...]
    """One layer's routed experts on the device."""
    cpu_experts_ns: tuple[float, ...]
    """One layer's routed experts on the CPU, all of them, from their hand-over until they are back, with one thread as
    all of `cpu_*`."""
    pass_overhead_ns: tuple[float, ...]
    """Per pass beside layers: embedding, head, sampling, generation loop."""
    decide_ns: float
    """Engine bookkeeping per layer when all experts are resident."""
    decide_per_load_ns: float
    """Further bookkeeping per load that is planned."""
    predict_ns: float
    """One prediction of the next layer's experts by its own router."""
    predict_by_source_ns: dict[str, float] = {}
    """The same for prefetch sources that cost something else, such as `estimator`."""
    plan_ns: float = 0.0
    """Choosing what to load while a pass is drafted, once per pass; 0 where it was not measured."""
    decide_utility_ns: float = 0.0
    """Further bookkeeping per layer where utilities are kept and layers are balanced."""
    draft: DraftCosts | None = None
    """Of the draft model that was given."""
    samples: int = 0
    """Decode passes behind the means."""
    decide_first_load_ns: float = 0.0
    """Further bookkeeping where anything is loaded, whatever the number of loads: the link is woken."""
    cpu_layer_ns: float = 0.0
    """The part of `cpu_experts_ns` that does not depend on how many of the layer's experts run there."""
    cpu_start_ns: float = 0.0
    """Further bookkeeping of a layer with experts on the CPU."""
    cpu_split_ns: float = 0.0
    """Further time of the device's part of a layer of which another part runs on the CPU."""
    cpu_beside_ns: float = 0.0
    """Further time of the CPU's part of a layer of which another part runs on the device."""
    cpu_paced_ns: float = 0.0
    """An emulated CPU runs no expert in less; 0: it is as fast as this machine."""
    cpu_by_threads: tuple[CpuThreadCosts, ...] = ()
    """The same with more threads, rising; empty: one thread alone was measured."""
    stall_ns: tuple[float, ...] = ()
    """Lengths of stalls at which `wakeup_ns` was measured, rising; empty: `link.wakeup_ns` after every stall."""
    wakeup_ns: tuple[float, ...] = ()
    """Time lost after a stall: a thread that wakes late, and cold caches for what runs next."""
    probe_ns: float = 0.0
    """Duration of a fixed piece of work while this was measured, which tells later whether the machine runs at the
    same speed (`runtime.steadiness`); 0 where it was not."""

    def slowed(self, ratio: float) -> MeasuredCosts:
        """The same costs on a machine on which all of them take `ratio` times longer."""
        decisions = ("decide_ns", "decide_first_load_ns", "decide_per_load_ns", "decide_utility_ns")
        others = ("predict_ns", "plan_ns", "cpu_layer_ns", "cpu_start_ns", "cpu_split_ns", "cpu_beside_ns", "probe_ns")
        tables = ("dense_ns", "experts_ns", "cpu_experts_ns", "pass_overhead_ns", "wakeup_ns")
        changed: dict[str, Any] = {name: ratio * getattr(self, name) for name in decisions + others}
        changed |= {name: tuple(ratio * value for value in getattr(self, name)) for name in tables}
        changed["predict_by_source_ns"] = {name: ratio * value for name, value in self.predict_by_source_ns.items()}
        changed["draft"] = self.draft.slowed(ratio) if self.draft else None
        changed["cpu_by_threads"] = tuple(costs.slowed(ratio) for costs in self.cpu_by_threads)
        return self.model_copy(update=changed)

    @property
    def cpu_threads(self) -> tuple[int, ...]:
        """Numbers of threads that experts on the CPU were measured with, rising."""
        return (1, *(costs.threads for costs in self.cpu_by_threads))

    def with_cpu_threads(self, threads: int | None) -> MeasuredCosts:
        """The costs with so many threads for experts on the CPU; None: one.

        Raises:
            ProfileError: that was not measured.
        """
        if threads in (None, 1):
            return self
        for costs in self.cpu_by_threads:
            if costs.threads == threads:
                return self.model_copy(update=costs.model_dump(exclude={"threads"}))
        raise ProfileError(
            f"cpu.threads is {threads} and the profile was calibrated with {numbers_text(self.cpu_threads)} for "
            "experts on the CPU; take one of these, or calibrate again with --cpu-threads"
        )

    @model_validator(mode="after")
    def _tables_fit(self) -> MeasuredCosts:
        if not self.tokens or list(self.tokens) != sorted(set(self.tokens)):
            raise ValueError("tokens must rise and not be empty")
        for name in ("dense_ns", "experts_ns", "cpu_experts_ns", "pass_overhead_ns"):
            if len(getattr(self, name)) != len(self.tokens):
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {len(self.tokens)} token counts")
        if list(self.stall_ns) != sorted(set(self.stall_ns)) or len(self.stall_ns) != len(self.wakeup_ns):
            raise ValueError("stall_ns must rise and have as many entries as wakeup_ns")
        if list(self.cpu_threads) != sorted(set(self.cpu_threads)):
            raise ValueError("cpu_by_threads must rise by threads")
        if any(len(costs.cpu_experts_ns) != len(self.tokens) for costs in self.cpu_by_threads):
            raise ValueError(
                f"cpu_by_threads: cpu_experts_ns needs an entry for each of {len(self.tokens)} token counts"
            )
        return self


class HardwareProfile(BaseModel):
    """A machine: link, device, and, where the machine was calibrated, measured compute times of a model.

    With `measured` the simulator uses those times; without it, a roofline of the device's data sheet.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    schema_version: int = PROFILE_SCHEMA_VERSION
    name: str
    description: str = ""
    emulated: bool = False
    """True when the link or the device is emulated, which every report repeats."""
    link: LinkProfile
    device: DeviceProfile
    host: HostProfile | None = None
    """Needed where experts run on the CPU, unless the machine was calibrated."""
    disk: DiskProfile | None = None
    measured: MeasuredCosts | None = None
    error_band: ErrorBand | None = None
    """Of predicted time per token for the calibrated model, from validation on this profile; None where nobody
    validated."""

    @model_validator(mode="before")
    @classmethod
    def _old_band(cls, values: Any) -> Any:
        return from_old_fields(values)

    @property
    def digest(self) -> str:
        """SHA-256 over all numbers that predict, so not over the error band, as `sha256:<hex>`."""
        left_out: dict[str, Any] = {"error_band": True}
        if self.measured is not None and not self.measured.cpu_by_threads:
            left_out["measured"] = {"cpu_by_threads"}  # so that profiles from before it was measured keep theirs
        return text_digest(self.model_dump_json(exclude=left_out))

    def save(self, path: Path) -> None:
        """Write the profile as TOML, atomically."""
        document = tomlkit.document()
        document.add(tomlkit.comment("Hardware profile of MoE Offload Studio. Units are in the names of the keys;"))
        document.add(tomlkit.comment("kind is one of: measured, data sheet, derived, guess."))
        for key, value in _without_none(self.model_dump(mode="json")).items():
            document.add(key, tomlkit.item(_inline_quantities(value)))
        write_text_atomic(path, tomlkit.dumps(document))

    @staticmethod
    def load(path: Path) -> HardwareProfile:
        """Read a profile from a TOML file, or by name: a machine that ships with the project, or parts with `+`
        between them, such as `rtx4090+ddr5-6000-2ch+pcie4x16`.

        Raises:
            ProfileError: missing, not TOML, of another schema version, or a field is missing or wrong.
        """
        from trace_capture.machine_parts import named_profile

        path = Path(path)
        if not path.is_file():
            return named_profile(str(path))
        raw = read_toml(path, "hardware profile")
        version = raw.get("schema_version")
        if version != PROFILE_SCHEMA_VERSION:
            raise ProfileError(f"hardware profile {path} has schema_version {version}, wanted {PROFILE_SCHEMA_VERSION}")
        return checked(HardwareProfile, raw, f"hardware profile {path}")


def numbers_text(counts: tuple[int, ...]) -> str:
    """Numbers of threads in words, such as `1, 2 or 4 threads`."""
    *first, last = map(str, counts)
    text = f"{', '.join(first)} or {last}" if first else last
    return f"{text} thread{'s' if counts[-1] > 1 else ''}"


Part = TypeVar("Part", bound=BaseModel)


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The content of a TOML file; `what` is how messages call it.

    Raises:
        ProfileError: missing or not TOML.
    """
    try:
        return tomlkit.parse(path.read_text(encoding="utf-8")).unwrap()
    except OSError as error:
        raise ProfileError(f"cannot read {what} {path}: {error.strerror}") from error
    except (tomlkit.exceptions.ParseError, UnicodeDecodeError) as error:
        raise ProfileError(f"{what} {path} is not TOML: {error}; mend the line or calibrate again") from error


def checked(kind: type[Part], raw: dict[str, Any], where: str) -> Part:
    """A profile or a part of one from what a file says.

    Raises:
        ProfileError: a field is missing or wrong; the message names it behind `where`.
    """
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ProfileError(f"{where}: {place}: {first['msg']}; mend that key") from error


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    return value


def _inline_quantities(value: Any) -> Any:
    """Quantities on one line each, so that a person can read the file top to bottom."""
    if not isinstance(value, dict):
        return value
    if "kind" in value and "value" in value:
        inline = tomlkit.inline_table()
        inline.update(value)
        return inline
    table = tomlkit.table()
    for key, entry in value.items():
        table.add(key, _inline_quantities(entry))
    return table
