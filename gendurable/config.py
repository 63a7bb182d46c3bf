"""Config and its layering: mappings in, Config out. Command line > environment > file > defaults.

Each layer holds only what was set; the defaults stand on `Config` and nowhere else. Every setting remembers which layer
it came from, and what is wrong with one is said with its name, its value, its layer and the remedy.
"""

import difflib
import json
import platform
from collections.abc import Collection, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NoReturn, TypeAlias

from attrs import Factory, asdict, fields, frozen

from gendurable.core.duration import format_duration
from gendurable.core.limiters import Limiters, RateLimit
from gendurable.core.limits import Limits, show
from gendurable.core.schedules import CATCH_UPS, Schedule, check_cron, check_timezone
from gendurable.errors import ConfigError
from gendurable.masking import mask_dsn
from gendurable.readers import (
    MAX_QUEUE_SIZE,
    Reader,
    number,
    one_of,
    parse_address,
    read_address,
    read_dsn,
    read_identifier,
    read_name,
    read_path,
    read_paths,
    read_positive,
    read_positive_or_off,
    read_prefetch,
    read_queues,
    read_text,
    read_truth,
)
from gendurable.tables import inside, read_concurrency_limits, read_rate_limits, tables

FILE_NAME = "gendurable.toml"
PREFIX = "GENDURABLE_"

MOST_LOCK_CONNECTIONS = 32
MAX_PROCESSES = 256
MAX_GC_BATCH = 100_000
# Three heartbeats must fit into a lease: two may fail before a claim is lost.
HEARTBEATS_PER_LEASE = 3
# A name and a key stand together in one index entry, which may take a third of a page.
MAX_NAME_AND_KEY_BYTES = 2600


def _host_name() -> str:
    return platform.node() or "localhost"


@frozen(kw_only=True)
class Config:
    """Every setting of a worker and of the command line, checked."""

    # The database. An empty dsn leaves it to libpq's own variables.
    dsn: str = ""
    lock_dsn: str | None = None
    schema: str = "public"
    prepare: bool = True
    connect_timeout: timedelta = timedelta(seconds=5)
    statement_timeout: timedelta = timedelta(seconds=30)
    lock_connections: int | None = None

    # What a worker runs.
    fsms: tuple[str, ...] = ()
    queues: Mapping[str, int] = MappingProxyType({"default": 10})
    rate_limits: Mapping[str, RateLimit] = MappingProxyType({})
    concurrency_limits: Mapping[str, int] = MappingProxyType({})
    schedules: Mapping[str, Schedule] = MappingProxyType({})

    # How it runs it.
    lease: timedelta = timedelta(seconds=60)
    heartbeat: timedelta = timedelta(seconds=20)
    poll: timedelta = timedelta(seconds=1)
    max_poll: timedelta = timedelta(seconds=5)
    reap: timedelta = timedelta(seconds=30)
    reaper: bool = True
    drain_timeout: timedelta = timedelta(seconds=5)
    prefetch: int | Literal["auto"] = 0
    min_demand: int = 1
    max_abandoned: int = 10
    processes: int = 1
    name: str = Factory(_host_name)
    switch_interval: timedelta | None = None

    # How it is seen.
    http: str | None = None
    log_format: str = "auto"
    log_level: str = "info"

    # How long ended instances are kept; None: nothing is deleted.
    gc_retention: timedelta | None = None
    gc_interval: timedelta = timedelta(seconds=60)
    gc_batch: int = 10_000

    # The private server of `gendurable dev`.
    embedded_home: Path | None = None
    embedded_bin: Path | None = None

    limits: Limits = Factory(Limits)

    @property
    def lock_connection_limit(self) -> int:
        """How many partitioned and transactional steps may run at once: each needs a connection of its own."""
        return self.lock_connections or min(sum(self.queues.values()), MOST_LOCK_CONNECTIONS)

    @property
    def limiters(self) -> Limiters:
        """The rate and concurrency limits, to be published."""
        return Limiters(self.rate_limits, self.concurrency_limits)

    @property
    def http_address(self) -> tuple[str, int] | None:
        """Where probes and metrics are served, as host and port."""
        return None if self.http is None else parse_address(self.http)


@frozen
class Setting:
    """One setting as `config show` prints it: a plain value without secrets, and where it came from."""

    value: Any
    source: str


@frozen
class Loaded:
    """A configuration and the layer that each of its settings came from."""

    config: Config
    settings: Mapping[str, Setting]


def load(
    *,
    cli: Mapping[str, Any],
    env: Mapping[str, str],
    file: Mapping[str, Any] | None = None,
    file_path: str = FILE_NAME,
    flags: Mapping[str, str] = MappingProxyType({}),
    commands: Collection[str] = (),
) -> Loaded:
    """Lay the layers over each other and check the whole.

    `cli` has the settings' own names as keys, `flags` what was typed for them where that is something else; `file` is
    what TOML was read into. `commands` are the names after which a variable may be named that is none of ours
    (`GENDURABLE_LIST_LIMIT`).
    """
    _refuse_misspelt_variables(env, commands)
    values: dict[str, Any] = {}
    settings = {key.name: Setting(_shown(key, _default(key)), "default") for key in _KEYS}
    # A value is judged even where a later layer replaces it: nobody wants to learn of it when that one goes away.
    for layer in (_from_file(file or {}, file_path), _from_environment(env), _from_command_line(cli, flags)):
        for name, (raw, source) in layer.items():
            values[name] = _read(_BY_NAME[name], raw, source)
            settings[name] = Setting(_shown(_BY_NAME[name], values[name], raw), source)
    limits = {name.removeprefix(_LIMIT): values.pop(name) for name in list(values) if name.startswith(_LIMIT)}
    config = Config(**values, limits=Limits(**limits))
    _check_whole(config, settings)
    return Loaded(config, settings)


def read_schedules(raw: Any) -> Mapping[str, Schedule]:
    """Return schedules: a cron expression, its time zone, and what is inserted at each tick."""
    return MappingProxyType({name: _schedule(name, given) for name, given in tables(raw, _SCHEDULE)})


def _schedule(name: str, given: Mapping[str, Any]) -> Schedule:
    return Schedule(
        name=name,
        cron=inside(name, "cron", lambda text: check_cron(read_text(text)), given),
        timezone=inside(name, "timezone", lambda text: check_timezone(read_text(text)), given, "UTC"),
        fsm=inside(name, "fsm", read_name, given),
        version=inside(name, "version", number(1, 2**31 - 1), given),
        state=inside(name, "state", _read_state, given, {}),
        queue=inside(name, "queue", read_name, given),
        priority=inside(name, "priority", number(-(2**15), 2**15 - 1), given, 0),
        catch_up=inside(name, "catch_up", one_of(*CATCH_UPS), given, CATCH_UPS[0]),
    )


def _read_state(raw: Any) -> Mapping[str, Any]:
    if not isinstance(raw, Mapping):
        raise ValueError(f"{show(raw)} is no table: write the state as {{ name = value }}")
    return raw


# The settings: what reads each, where it stands in the file, and which variables carry it.


@frozen
class _Key:
    name: str
    read: Reader
    places: tuple[str, ...]
    variables: tuple[str, ...]


def _key(name: str, read: Reader, *places: str, variables: tuple[str, ...] | None = None) -> _Key:
    return _Key(name, read, places or (name,), (PREFIX + name.upper(),) if variables is None else variables)


def _worker_key(name: str, read: Reader) -> _Key:
    return _key(name, read, f"worker.{name}")


_LIMIT = "limits_"
_LIMIT_RANGES = {
    "name_bytes": (1, 1024),
    "key_bytes": (1, 2048),
    "json_bytes": (2, 64 * 1024 * 1024),
    "json_depth": (1, 400),
    "inbox": (1, 1_000_000),
    "error_bytes": (64, 1024 * 1024),
    "integer_bits": (1024, 8192),
}

_KEYS = (
    _key("dsn", read_dsn, variables=("GENDURABLE_DSN", "DATABASE_URL")),
    _key("lock_dsn", read_dsn),
    _key("schema", read_identifier),
    _key("prepare", read_truth),
    _key("connect_timeout", read_positive),
    _key("statement_timeout", read_positive),
    _key("lock_connections", number(1, MAX_QUEUE_SIZE)),
    _key("fsms", read_paths, "fsms", "worker.fsms"),
    _key("queues", read_queues, "queues", "worker.queues"),
    # Tables of tables: for the file only.
    _key("rate_limits", read_rate_limits, variables=()),
    _key("concurrency_limits", read_concurrency_limits, variables=()),
    _key("schedules", read_schedules, variables=()),
    _worker_key("lease", read_positive),
    _worker_key("heartbeat", read_positive),
    _worker_key("poll", read_positive),
    _worker_key("max_poll", read_positive),
    _worker_key("reap", read_positive),
    _worker_key("reaper", read_truth),
    _worker_key("drain_timeout", read_positive),
    _worker_key("prefetch", read_prefetch),
    _worker_key("min_demand", number(1, MAX_QUEUE_SIZE)),
    _worker_key("max_abandoned", number(0, MAX_QUEUE_SIZE)),
    _worker_key("processes", number(1, MAX_PROCESSES)),
    _worker_key("name", read_name),
    _worker_key("switch_interval", read_positive_or_off),
    _key("http", read_address, "http.listen", "worker.http"),
    _key("log_format", one_of("auto", "console", "json"), "log.format", "worker.log_format"),
    _key("log_level", one_of("debug", "info", "warning", "error"), "log.level", "worker.log_level"),
    _key("gc_retention", read_positive_or_off, "gc.retention"),
    _key("gc_interval", read_positive, "gc.interval"),
    _key("gc_batch", number(1, MAX_GC_BATCH), "gc.batch"),
    _key("embedded_home", read_path, "embedded.home", variables=("GENDURABLE_HOME",)),
    _key("embedded_bin", read_path, "embedded.bin", variables=("GENDURABLE_PG_BIN",)),
    *(_key(_LIMIT + name, number(*ends), f"limits.{name}") for name, ends in _LIMIT_RANGES.items()),
)
_BY_NAME = {key.name: key for key in _KEYS}
_BY_PLACE = {place: key for key in _KEYS for place in key.places}
_SECTIONS = {place.partition(".")[0] for place in _BY_PLACE if "." in place}


_SCHEDULE = {
    "cron": True,
    "fsm": True,
    "timezone": False,
    "state": False,
    "queue": False,
    "priority": False,
    "version": False,
    "catch_up": False,
}


def _read(key: _Key, raw: Any, source: str) -> Any:
    try:
        return key.read(raw)
    except ValueError as error:
        raise ConfigError(f"{_label(key)}: {error} (from {source})") from None


def _label(key: _Key) -> str:
    return key.places[0]


def _default(key: _Key) -> Any:
    owner, name = (Limits, key.name.removeprefix(_LIMIT)) if key.name.startswith(_LIMIT) else (Config, key.name)
    default = getattr(fields(owner), name).default
    return default.factory() if isinstance(default, Factory) else default  # type: ignore[arg-type]


def _shown(key: _Key, value: Any, raw: Any = None) -> Any:
    """Return a setting as JSON can say it: a duration as it was written, a DSN without its password."""
    if key.read is read_dsn:
        return value if value is None else mask_dsn(value)
    if isinstance(value, timedelta):
        return raw.strip() if isinstance(raw, str) else format_duration(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return list(value)
    return {name: _shown_entry(key, each) for name, each in value.items()} if isinstance(value, Mapping) else value


def _shown_entry(key: _Key, value: Any) -> Any:
    """Return an entry of a table as JSON can say it; what was left out is left out."""
    if isinstance(value, Schedule):
        said = {
            name: each for name, each in asdict(value, recurse=False).items() if each is not None and name != "name"
        }
        return said | {"state": json.loads(json.dumps(value.state, default=str))}  # TOML has times of its own
    if isinstance(value, RateLimit):
        return asdict(value) | {"period": format_duration(value.period)}
    return {"limit": value} if key.read is read_concurrency_limits else value


# The layers: setting -> (what was given, where).

_Layer: TypeAlias = dict[str, tuple[Any, str]]


def _from_command_line(cli: Mapping[str, Any], flags: Mapping[str, str]) -> _Layer:
    return {name: (raw, f"cli {flags.get(name, '--' + name.replace('_', '-'))}") for name, raw in cli.items()}


def _from_environment(env: Mapping[str, str]) -> _Layer:
    """What the environment sets. An empty variable is one that is not set, as deployments cannot always unset one."""
    return {
        key.name: (env[variable], f"environment {variable}")
        for key in _KEYS
        for variable in reversed(key.variables)  # so that the first one wins
        if env.get(variable)
    }


def _from_file(file: Mapping[str, Any], path: str) -> _Layer:
    layer: _Layer = {}
    for place, raw in _leaves(file, path):
        key = _BY_PLACE.get(place)
        if key is None:
            _refuse_unknown(place, path)
        if key.name in layer:
            raise ConfigError(f"{place}: the same setting as {layer[key.name][1]}; give it once (in {path})")
        layer[key.name] = (raw, f"file {path}" if place == key.places[0] else f"file {path} ({place})")
    return layer


def _leaves(file: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Walk the file; a name may be written with dashes, as the flags are."""
    for name, value in file.items():
        section = name.replace("-", "_")
        if section in _BY_PLACE or section not in _SECTIONS:
            yield section, value
        elif isinstance(value, Mapping):
            yield from ((f"{section}.{inner.replace('-', '_')}", each) for inner, each in value.items())
        else:
            inside = next(place for place in _BY_PLACE if place.startswith(f"{section}.")).partition(".")[2]
            raise ConfigError(
                f"{name}: {show(value)} is no table; write [{section}] and below it {inside} = … (in {path})"
            )


def _refuse_unknown(place: str, path: str) -> NoReturn:
    leaf = place.rpartition(".")[2]
    same_leaf = [known for known in _BY_PLACE if known.rpartition(".")[2] == leaf]
    close = same_leaf or difflib.get_close_matches(place, [*_BY_PLACE, *_SECTIONS], n=1) or _close_leaf(leaf)
    hint = f"did you mean {close[0]}?" if close else f"the settings are {', '.join(dict.fromkeys(map(_label, _KEYS)))}"
    raise ConfigError(f"{place}: no such setting in {path}; {hint}")


def _close_leaf(leaf: str) -> list[str]:
    leaves = {known.rpartition(".")[2]: known for known in reversed(_BY_PLACE)}
    return [leaves[close] for close in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.7)]


# How alike a variable and one of ours must be to be taken for a misspelling of it.
_MISSPELT = 0.8


def _refuse_misspelt_variables(env: Mapping[str, str], commands: Collection[str]) -> None:
    """Refuse a variable that is nearly one of ours; others may belong to tests, to a command or to an orchestrator."""
    known = {
        variable.removeprefix(PREFIX) for key in _KEYS for variable in key.variables if variable.startswith(PREFIX)
    }
    others = {"CONFIG", "DEBUG", "SUPERVISOR", "TEST_DSN", "HYPOTHESIS_PROFILE"}
    prefixes = tuple(f"{command.upper().replace('-', '_')}_" for command in commands)
    for variable in sorted(env):
        name = variable.removeprefix(PREFIX)
        if name == variable or name in known | others or name.startswith(prefixes):
            continue
        close = difflib.get_close_matches(name, sorted(known | {"CONFIG"}), n=1, cutoff=_MISSPELT)
        close = close or [each for each in sorted(known) if sorted(each) == sorted(name)]
        if close:
            raise ConfigError(f"{variable}: no such variable; did you mean {PREFIX}{close[0]}? (in the environment)")


# The whole.


def _check_whole(config: Config, settings: Mapping[str, Setting]) -> None:
    if config.heartbeat * HEARTBEATS_PER_LEASE > config.lease:
        raise ConfigError(
            f"{_said('heartbeat', settings)} times {HEARTBEATS_PER_LEASE} is longer than {_said('lease', settings)}: "
            "shorten the heartbeat or lengthen the lease"
        )
    if config.poll > config.max_poll:
        raise ConfigError(
            f"{_said('poll', settings)} is longer than {_said('max_poll', settings)}: "
            "shorten the one or lengthen the other"
        )
    if config.limits.name_bytes + config.limits.key_bytes > MAX_NAME_AND_KEY_BYTES:
        raise ConfigError(
            f"{_said('limits_name_bytes', settings)} and {_said('limits_key_bytes', settings)} together pass "
            f"{MAX_NAME_AND_KEY_BYTES}, what an index entry can hold: lower one of them"
        )


def _said(name: str, settings: Mapping[str, Setting]) -> str:
    setting = settings[name]
    return f"{_label(_BY_NAME[name])} {setting.value} (from {setting.source})"
