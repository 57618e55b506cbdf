"""Configuration of a cluster in ``cluster.toml``: number and resources of the replicas, scaling and stages.

::

    [replicas]
    min = 1
    max = 4
    cpus = 2.0
    gpus = 1.0

    [scaling]
    rows_per_replica = 64.0
    idle_s = 300.0

    [stages]
    together = true

With ``together = false``, ``[encode]`` and ``[decode]`` describe the replicas of these stages, and ``[replicas]`` those
that denoise. Every key has a default. This module does not import ray.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from diffserve.api.errors import ConfigError
from diffserve.settings.config import Settings
from diffserve.settings.layers import load_settings, nearest

MAX_REPLICAS: Final = 1000
ARGUMENTS: Final = ("cluster", "config", "model", "revision")


class ReplicaConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[replicas]``: number and resources of the replicas of a stage.

    Attributes:
        min: Replicas that always run. With 0 the first request starts a replica and gets a 503 with Retry-After.
        max: Upper limit.
        cpus: CPUs that Ray reserves for a replica.
        gpus: GPUs that Ray reserves for a replica.
    """

    min: int = 1
    max: int = 1
    cpus: float = 1.0
    gpus: float = 0.0


class ScalingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[scaling]``: when replicas are started and stopped.

    Attributes:
        rows_per_replica: Queued work per replica above which another is started, in UNet rows of the native size.
        idle_s: Seconds for which fewer replicas must have been enough before one is stopped; the start time of a
            replica if that is longer, up to ten times this.
    """

    rows_per_replica: float = 64.0
    idle_s: float = 300.0


class StagesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[stages]``: whether text encoding, denoising and decoding share a replica (``together``)."""

    together: bool = True


class Deployment(NamedTuple):
    """A possible replica: its name, its stage (``EngineConfig.stage``) and its resources."""

    name: str
    stage: str
    resources: ReplicaConfig


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The complete ``cluster.toml``; raises ConfigError for values out of range."""

    replicas: ReplicaConfig = ReplicaConfig()
    scaling: ScalingConfig = ScalingConfig()
    stages: StagesConfig = StagesConfig()
    encode: ReplicaConfig = ReplicaConfig()
    decode: ReplicaConfig = ReplicaConfig()

    def __post_init__(self) -> None:
        """Check all values."""
        for name, each in (("replicas", self.replicas), ("encode", self.encode), ("decode", self.decode)):
            _check_replicas(name, each)
        _check_amount("scaling.idle_s", self.scaling.idle_s)
        rows = self.scaling.rows_per_replica
        if not (math.isfinite(rows) and rows > 0.0):
            raise ConfigError(f"scaling.rows_per_replica is {rows}; it must be more than 0.", param="scaling")
        for name in ("encode", "decode"):
            if self.stages.together and getattr(self, name) != ReplicaConfig():
                raise ConfigError(
                    f"[{name}] has no effect while stages.together is true; set stages.together to false.", param=name
                )

    @property
    def deployments(self) -> list[Deployment]:
        """Every possible replica of all stages."""
        if self.stages.together:
            return [Deployment(f"replica-{number}", "all", self.replicas) for number in range(self.replicas.max)]
        stages = (("encode", self.encode), ("denoise", self.replicas), ("decode", self.decode))
        return [Deployment(f"{stage}-{number}", stage, each) for stage, each in stages for number in range(each.max)]

    def of_stage(self, stage: str) -> ClusterConfig:
        """Return the configuration of the replicas of one stage."""
        each = {"encode": self.encode, "decode": self.decode}.get(stage, self.replicas)
        return replace(self, replicas=each, stages=StagesConfig(), encode=ReplicaConfig(), decode=ReplicaConfig())


def _check_replicas(name: str, each: ReplicaConfig) -> None:
    if not 1 <= each.max <= MAX_REPLICAS:
        raise ConfigError(f"{name}.max is {each.max}; it must be between 1 and {MAX_REPLICAS}.", param=name)
    if not 0 <= each.min <= each.max:
        raise ConfigError(f"{name}.min is {each.min}; it must be between 0 and max, {each.max}.", param=name)
    _check_amount(f"{name}.cpus", each.cpus)
    _check_amount(f"{name}.gpus", each.gpus)


def _check_amount(name: str, number: float) -> None:
    if not (math.isfinite(number) and number >= 0.0):
        raise ConfigError(f"{name} is {number}; it must be 0 or more.", param=name)


def settings_of(settings: Settings, stage: str) -> Settings:
    """Return ``settings`` for a replica of ``stage``."""
    return replace(settings, engine=replace(settings.engine, stage=stage))


def read_arguments(arguments: Mapping[str, str]) -> tuple[Settings, ClusterConfig]:
    """Read the files that the arguments of an application of Ray Serve name.

    Args:
        arguments: Any of ``cluster`` (path of the cluster's file), ``config`` (settings file or name of a built-in
            one), ``model`` (as ``--model``) and ``revision`` (any word; Ray Serve reads the files again if it
            changes).

    Raises:
        ConfigError: An argument is unknown, or a file cannot be read or is invalid.
    """
    for name in arguments:
        if name not in ARGUMENTS:
            raise ConfigError(f"unknown argument {name}; {nearest(name, ARGUMENTS)}")
    settings = load_settings(model=arguments.get("model"), config=arguments.get("config"))
    file = arguments.get("cluster")
    return settings, read_cluster(None if file is None else Path(file))


def read_cluster(path: Path | None) -> ClusterConfig:
    """Read ``path``, or return the defaults for ``None``; raise ConfigError if it cannot be read or is invalid."""
    if path is None:
        return ClusterConfig()
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read the cluster file {str(path)!r}: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from None
    _check_names(path, tables)
    try:
        return msgspec.convert(tables, ClusterConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}.") from None


def _check_names(path: Path, tables: dict[str, Any]) -> None:
    tables_by_name: dict[str, type[msgspec.Struct]] = {"replicas": ReplicaConfig, "scaling": ScalingConfig}
    tables_by_name |= {"stages": StagesConfig, "encode": ReplicaConfig, "decode": ReplicaConfig}
    for table, entries in tables.items():
        if table not in tables_by_name:
            raise ConfigError(f"{path}: unknown table [{table}]; {nearest(table, tables_by_name)}")
        for key in entries if isinstance(entries, dict) else ():
            fields = tables_by_name[table].__struct_fields__
            if key not in fields:
                raise ConfigError(f"{path}: unknown key {table}.{key}; {nearest(key, fields)}")
