"""The configuration of a run: one frozen model, every key checked before anything is loaded.

Precedence, later wins: the defaults here, the scenario's own `defaults`, `--config FILE.toml`, `--set key=value`, explicit flags.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from coordinator.app.rollout import RolloutConfig, rollout_problems


class ConfigError(Exception):
    """The operator's configuration is wrong: every problem found, with key, value and rule. Nothing was started."""


AUTO = "auto"


class Learning(BaseModel):
    """How one agent learns and samples. `every`: it updates in rounds divisible by this; 0: frozen. `max_lag`: so many of its updates may
    be missing when a rollout begins; above 0, rollouts and updates of the run overlap.

    `denominator`: what the loss is averaged over, the agent's sequences or its trained tokens. `temperature` counts in sampler and
    scorer alike. `loss` AUTO: what fits `max_lag`; `ratio_cap` counts for `ppo` and for agents that may lag.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    algorithm: str = "grpo"
    scale: Literal["group", "batch", "none"] = "batch"
    loss: str = AUTO
    denominator: Literal["sequences", "tokens"] = "sequences"
    lr: Annotated[float, Field(gt=0)] = 1e-3
    warmup: Annotated[int, Field(ge=0)] = 0
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip: Annotated[float, Field(ge=0)] = 1.0
    ratio_clip: Annotated[float, Field(gt=0)] = 0.2
    ratio_cap: Annotated[float, Field(ge=0)] = 3.0
    entropy: Annotated[float, Field(ge=0)] = 0.0
    kl: Annotated[float, Field(ge=0)] = 0.0
    epochs: Annotated[int, Field(ge=1)] = 1
    rank: Annotated[int, Field(ge=1)] = 8
    alpha: Annotated[float, Field(gt=0)] = 16.0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    temperature: Annotated[float, Field(gt=0)] = 1.0
    max_tokens: Annotated[int, Field(ge=1)] = 64
    every: Annotated[int, Field(ge=0)] = 1
    max_lag: Annotated[int, Field(ge=0)] = 0

    @field_validator("ratio_cap")
    @classmethod
    def _above_one(cls, cap: float) -> float:
        if 0 < cap <= 1:
            raise ValueError(
                f"must be above 1, where a ratio is that of an unchanged policy, or 0 for none (got {cap})"
            )
        return cap

    @property
    def lags(self) -> bool:
        """Whether it may train on tokens that are older than its weights."""
        return self.max_lag > 0 and self.every > 0

    @property
    def correction(self) -> str:
        """The loss by name: the one that was asked for, else the one that fits."""
        return self.loss if self.loss != AUTO else "ppo" if self.lags else "importance_sampling"

    def algorithm_options(self) -> dict[str, Any]:
        """What the named algorithm is made with."""
        return {"scale": self.scale} if self.algorithm == "grpo" else {}


class AgentConfig(BaseModel):
    """One agent: the seats it plays (empty: the seat of its own name), and what it does otherwise than `[learning]` says."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seats: tuple[str, ...] = ()
    learning: Mapping[str, Any] = Field(default_factory=dict)

    @field_validator("learning")
    @classmethod
    def _sensible(cls, own: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            Learning.model_validate(dict(own))
        except ValidationError as error:
            raise ValueError("\n".join(sentences(error))) from error
        return own


BARRIERS = tuple(f"{phase}_{edge}" for phase in ("rollout", "update", "evaluate") for edge in ("start", "end"))


class BarrierConfig(BaseModel):
    """How long a global barrier may stay shut (`deadline` seconds; 0: as long as it takes), and what happens then."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    deadline: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    straggler: Literal["wait", "drop", "fail"] = "wait"
    quorum: Annotated[int, Field(ge=1)] = 1


class Barriers(BarrierConfig):
    """For every barrier, and for each what it does otherwise."""

    rollout_start: Mapping[str, Any] = Field(default_factory=dict)
    rollout_end: Mapping[str, Any] = Field(default_factory=dict)
    update_start: Mapping[str, Any] = Field(default_factory=dict)
    update_end: Mapping[str, Any] = Field(default_factory=dict)
    evaluate_start: Mapping[str, Any] = Field(default_factory=dict)
    evaluate_end: Mapping[str, Any] = Field(default_factory=dict)

    @field_validator(*BARRIERS)
    @classmethod
    def _sensible(cls, own: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            BarrierConfig.model_validate(dict(own))
        except ValidationError as error:
            raise ValueError("\n".join(sentences(error))) from error
        return own

    def at(self, barrier: str) -> BarrierConfig:
        """What holds at this one of `BARRIERS`."""
        for_all = {name: getattr(self, name) for name in BarrierConfig.model_fields}
        return BarrierConfig.model_validate({**for_all, **getattr(self, barrier)})


class RunConfig(BaseModel):
    """One run, fully resolved. `threads`: of the engine (0: all cores). `replies`: what the scripted engine answers with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scenario: str
    seed: Annotated[int, Field(ge=0)] = 0
    rounds: Annotated[int, Field(ge=1)] = 20
    groups: Annotated[int, Field(ge=1)] = 8
    group_size: Annotated[int, Field(ge=1)] = 8
    checkpoint_every: Annotated[int, Field(ge=0)] = 1
    evaluate_every: Annotated[int, Field(ge=0)] = 10
    update_order: Literal["together", "in_turn"] | tuple[tuple[str, ...], ...] = "together"
    max_failed_episodes: Annotated[float, Field(ge=0, le=1)] = 0.1
    turn_deadline: Annotated[float, Field(gt=0)] = 120.0
    episode_deadline: Annotated[float, Field(gt=0)] = 600.0
    worker_deadline: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 600.0
    operation_deadline: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1800.0
    concurrency: Annotated[int, Field(ge=1)] = 256
    model: str = "demo"
    engine: Literal["torch", "scripted"] = "torch"
    deterministic: bool = False
    threads: Annotated[int, Field(ge=0)] = 0
    replies: Annotated[tuple[str, ...], Field(min_length=1)] = ("yes", "no")
    rollout: RolloutConfig = RolloutConfig()
    learning: Learning = Learning()
    barriers: Barriers = Barriers()
    agents: Mapping[str, AgentConfig] = Field(default_factory=dict)
    params: Mapping[str, Any] = Field(default_factory=dict)

    def learning_of(self, agent: str) -> Learning:
        """`[learning]` with this agent's own values on top."""
        own = self.agents[agent].learning if agent in self.agents else {}
        return Learning.model_validate({**self.learning.model_dump(), **own})


def sentences(error: ValidationError) -> list[str]:
    """Each problem as `key: rule (got value)`."""
    lines = []
    for each in error.errors():
        key = ".".join(str(part) for part in each["loc"] if not str(part).startswith(("tuple[", "literal[")))
        if each["type"] == "value_error":  # ours, and made of sentences already
            lines += [f"{key}.{line}" for line in each["msg"].removeprefix("Value error, ").split("\n")]
            continue
        rule = "unknown key" if each["type"] == "extra_forbidden" else each["msg"]
        lines.append(f"{key}: {rule} (got {each['input']!r})" if key else rule)
    return lines


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings merged key by key; later layers win."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            if isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
                result[key] = merged(result[key], value)
            else:
                result[key] = value
    return result


def read_toml(path: Path) -> dict[str, Any]:
    """A configuration file; ConfigError if it cannot be read or is no TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML: {error}") from error


def assignment(text: str) -> dict[str, Any]:
    """`learning.lr=0.002` as a nested mapping. The value is read as TOML; what is no TOML is a string."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text!r} is no assignment; write key=value, for example --set learning.lr=0.002")
    try:
        parsed: Any = tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    for part in reversed(key.strip().split(".")):
        parsed = {part: parsed}
    result: dict[str, Any] = parsed
    return result


def resolve(*layers: Mapping[str, Any]) -> RunConfig:
    """The configuration from these layers; ConfigError names every problem at once."""
    try:
        return RunConfig.model_validate(merged(*layers))
    except ValidationError as error:
        raise ConfigError("the configuration is wrong:\n  " + "\n  ".join(sentences(error))) from error


def rollout_of(file: Mapping[str, Any], engine: str) -> RolloutConfig:
    """`[rollout]` of a configuration file, for a task server with this engine; what else is in the file is for runs."""
    rollout = resolve({"scenario": "any", "rollout": file.get("rollout", {})}).rollout
    if problems := rollout_problems(rollout, engine, {}):
        raise ConfigError("\n".join(problems))
    return rollout


def config_text(config: RunConfig) -> str:
    """The whole configuration as TOML, ready for `--config`."""
    plain = config.model_dump(mode="json", exclude_none=True)
    return "\n".join(_toml(plain)) + "\n"


def _toml(table: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Values first, then one section for each nested table."""
    lines = [f"{_key(name)} = {_value(value)}" for name, value in table.items() if not isinstance(value, Mapping)]
    for name, value in table.items():
        if isinstance(value, Mapping) and value:
            path = f"{prefix}{_key(name)}"
            lines += ["", f"[{path}]", *_toml(value, f"{path}.")]
    return lines


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else json.dumps(name)


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, str) else repr(value)
