"""Four layers, each setting with its provenance; what is impossible is refused by name, value, layer and remedy."""

import re
import subprocess
import sys
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gendurable.config import Config, Loaded, load
from gendurable.core.duration import format_duration, parse_duration
from gendurable.core.limiters import RateLimit
from gendurable.core.limits import DEFAULT_LIMITS, Limits, apply_limits, check_name
from gendurable.core.schedules import Schedule
from gendurable.errors import ConfigError, InvalidInstance
from gendurable.masking import MASK, mask_dsn, secrets_in


def loaded(
    cli: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    file: dict[str, Any] | None = None,
    **others: Any,
) -> Loaded:
    return load(cli=cli or {}, env=env or {}, file=file, **others)


def refusal(*layers: Any, **others: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        loaded(*layers, **others)
    return str(refused.value)


# Layers.


def test_without_any_layer_everything_has_its_default():
    found = loaded()
    assert found.config == Config()
    assert {setting.source for setting in found.settings.values()} == {"default"}


def test_the_command_line_beats_the_environment_which_beats_the_file_which_beats_the_default():
    file = {"worker": {"lease": "101s", "poll": "2s", "reap": "11s"}}
    env = {"GENDURABLE_LEASE": "102s", "GENDURABLE_POLL": "3s"}
    found = loaded({"lease": "103s"}, env, file, file_path="etc/shop.toml")
    config = found.config
    assert [config.lease, config.poll, config.reap, config.max_poll] == [
        timedelta(seconds=seconds) for seconds in (103, 3, 11, 5)
    ]
    assert [found.settings[name].source for name in ("lease", "poll", "reap", "max_poll")] == [
        "cli --lease",
        "environment GENDURABLE_POLL",
        "file etc/shop.toml",
        "default",
    ]


def test_every_setting_is_named_once_and_is_an_attribute_of_the_configuration():
    names = {field.name for field in attrs.fields(Config) if field.name != "limits"}
    names |= {f"limits_{field.name}" for field in attrs.fields(Limits)}
    assert set(loaded().settings) == names


FILE: dict[str, Any] = {
    "dsn": "postgresql:///shop",
    "lock_dsn": "postgresql://direct/shop",
    "schema": "durable",
    "prepare": False,
    "connect_timeout": "2s",
    "statement_timeout": "10s",
    "lock_connections": 7,
    "fsms": ["shop.machines", "shop.mails:registry"],
    "queues": {"default": 10, "check-out": 5},
    "schedules": {
        "nightly": {
            "cron": "0 3 * * *",
            "timezone": "Europe/Berlin",
            "fsm": "report",
            "version": 2,
            "state": {"kind": "short", "since": date(2031, 1, 1)},
            "queue": "reports",
            "priority": 5,
            "catch_up": "latest",
        },
        "hourly": {"cron": "0 * * * *", "fsm": "sweep"},
    },
    "rate_limits": {
        "stripe": {"allowed": 100, "period": "1m", "burst": 150},
        "mail-out": {"allowed": 5, "period": "2s"},
    },
    "concurrency_limits": {"stripe": {"limit": 20}},
    "worker": {
        "lease": "90s",
        "heartbeat": "10s",
        "poll": "500ms",
        "max_poll": "4s",
        "reap": "1m",
        "reaper": False,
        "drain-timeout": "60s",
        "prefetch": "auto",
        "min-demand": 3,
        "max-abandoned": 4,
        "processes": 2,
        "name": "shop",
        "switch_interval": "0.5ms",
    },
    "http": {"listen": "[::1]:9464"},
    "log": {"level": "debug", "format": "json"},
    "gc": {"retention": "7d", "interval": "10m", "batch": 500},
    "embedded": {"home": "/srv/pg", "bin": "/usr/lib/postgresql/16/bin"},
    "limits": {
        "name_bytes": 100,
        "key_bytes": 200,
        "json_bytes": 1000,
        "json_depth": 20,
        "inbox": 5,
        "error_bytes": 500,
        "integer_bits": 2048,
    },
}


def test_a_file_can_say_everything():
    found = loaded(file=FILE)
    assert {setting.source for setting in found.settings.values()} == {"file gendurable.toml"}
    assert found.config == Config(
        dsn="postgresql:///shop",
        lock_dsn="postgresql://direct/shop",
        schema="durable",
        prepare=False,
        connect_timeout=timedelta(seconds=2),
        statement_timeout=timedelta(seconds=10),
        lock_connections=7,
        fsms=("shop.machines", "shop.mails:registry"),
        queues={"default": 10, "check-out": 5},
        schedules={
            "nightly": Schedule(
                name="nightly",
                cron="0 3 * * *",
                timezone="Europe/Berlin",
                fsm="report",
                version=2,
                state={"kind": "short", "since": date(2031, 1, 1)},
                queue="reports",
                priority=5,
                catch_up="latest",
            ),
            "hourly": Schedule(name="hourly", cron="0 * * * *", timezone="UTC", fsm="sweep", state={}),
        },
        rate_limits={
            "stripe": RateLimit(100, timedelta(minutes=1), 150),
            "mail-out": RateLimit(5, timedelta(seconds=2), 5),
        },
        concurrency_limits={"stripe": 20},
        lease=timedelta(seconds=90),
        heartbeat=timedelta(seconds=10),
        poll=timedelta(milliseconds=500),
        max_poll=timedelta(seconds=4),
        reap=timedelta(minutes=1),
        reaper=False,
        drain_timeout=timedelta(minutes=1),
        prefetch="auto",
        min_demand=3,
        max_abandoned=4,
        processes=2,
        name="shop",
        switch_interval=timedelta(microseconds=500),
        http="[::1]:9464",
        log_format="json",
        log_level="debug",
        gc_retention=timedelta(days=7),
        gc_interval=timedelta(minutes=10),
        gc_batch=500,
        embedded_home=Path("/srv/pg"),
        embedded_bin=Path("/usr/lib/postgresql/16/bin"),
        limits=Limits(100, 200, 1000, 20, 5, 500, 2048),
    )


def test_limits_are_shown_as_they_are_written():
    settings = loaded(file=FILE).settings
    assert settings["concurrency_limits"].value == FILE["concurrency_limits"]
    stripe, mail = FILE["rate_limits"].values()
    assert settings["rate_limits"].value == {
        "stripe": stripe | {"period": "60s"},
        "mail-out": {**mail, "burst": 5},
    }


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"rate_limits": 5}, "rate_limits: 5 is no table"),
        ({"rate_limits": {"stripe": 5}}, "rate_limits: stripe: 5 is no table"),
        ({"rate_limits": {"a b": {"allowed": 1, "period": "1s"}}}, "rate_limits: 'a b' is no limit's name"),
        ({"rate_limits": {"a:b": {"allowed": 1, "period": "1s"}}}, "rate_limits: 'a:b' is no limit's name"),
        ({"rate_limits": {"s": {"period": "1m"}}}, "rate_limits: s.allowed is missing: write allowed = …"),
        ({"rate_limits": {"s": {"allowed": 1}}}, "rate_limits: s.period is missing"),
        ({"rate_limits": {"s": {"allowed": 0, "period": "1m"}}}, "s.allowed: 0 is out of range"),
        ({"rate_limits": {"s": {"allowed": 1, "period": 60}}}, "s.period: 60 has no unit"),
        ({"rate_limits": {"s": {"allowed": 1, "period": "0s"}}}, "s.period: '0s' is not longer than nothing"),
        ({"rate_limits": {"s": {"allowed": 1, "period": "400d"}}}, "s.period: '400d' is too long: give at most 366d"),
        ({"rate_limits": {"s": {"allowed": 1, "period": "1m", "burst": 0}}}, "s.burst: 0 is out of range"),
        ({"rate_limits": {"s": {"alowed": 1, "period": "1m"}}}, "s.alowed: no such setting; did you mean allowed?"),
        ({"concurrency_limits": {"s": {"maximum": 1}}}, "s.maximum: no such setting; the settings are limit"),
        ({"concurrency_limits": {"s": {}}}, "concurrency_limits: s.limit is missing: write limit = …"),
        ({"concurrency_limit": {"s": {"limit": 1}}}, "did you mean concurrency_limits?"),
    ],
)
def test_a_limit_that_can_be_none_is_refused_by_name(tables: dict[str, Any], words: str):
    with pytest.raises(ConfigError) as refused:
        loaded(file=tables)
    assert words in str(refused.value)
    assert "gendurable.toml" in str(refused.value)


def test_the_environment_can_say_everything_too_but_tables_of_tables():
    tables = {"rate_limits", "concurrency_limits", "schedules"}
    file = {name: value for name, value in FILE.items() if name not in tables}
    said = {name: setting for name, setting in loaded(file=file).settings.items() if name not in tables}
    special = {"embedded_home": "GENDURABLE_HOME", "embedded_bin": "GENDURABLE_PG_BIN"}
    env = {special.get(name, f"GENDURABLE_{name.upper()}"): as_text(setting.value) for name, setting in said.items()}
    found = loaded(env=env)
    assert found.config == loaded(file=file).config
    assert all(found.settings[name].source.startswith("environment GENDURABLE_") for name in said)


def as_text(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{queue}={size}" for queue, size in value.items())
    return ",".join(value) if isinstance(value, list) else str(value)


def test_the_flag_names_may_stand_in_the_worker_section_as_well():
    file = {"worker": {"http": "0.0.0.0:1", "log-level": "error", "log_format": "json", "fsms": "a,b", "queues": "q=1"}}
    config = loaded(file=file).config
    assert (config.http, config.log_level, config.log_format) == ("0.0.0.0:1", "error", "json")
    assert (config.fsms, dict(config.queues)) == (("a", "b"), {"q": 1})


def test_our_own_dsn_variable_beats_the_common_one_and_both_beat_the_file():
    file = {"dsn": "dbname=file"}
    both = {"GENDURABLE_DSN": "dbname=ours", "DATABASE_URL": "dbname=common"}
    assert loaded(env=both, file=file).config.dsn == "dbname=ours"
    found = loaded(env={"DATABASE_URL": "dbname=common"}, file=file)
    assert (found.config.dsn, found.settings["dsn"].source) == ("dbname=common", "environment DATABASE_URL")


def test_an_empty_variable_is_one_that_is_not_set():
    assert loaded(env={"GENDURABLE_LEASE": "", "GENDURABLE_QUEUES": "", "DATABASE_URL": ""}).config == Config()


def test_flags_that_are_repeated_add_up_and_commas_separate():
    config = loaded({"fsms": ("a.b, c", "a.b", "d:e"), "queues": ("a=1,b=2", "c = 3")}).config
    assert config.fsms == ("a.b", "c", "d:e")
    assert dict(config.queues) == {"a": 1, "b": 2, "c": 3}


def test_a_queue_name_may_hold_an_equals_sign():
    assert dict(loaded({"queues": "a=b=3"}).config.queues) == {"a=b": 3}


def test_a_flag_of_another_name_is_what_the_source_says():
    found = loaded({"gc_retention": "off"}, flags={"gc_retention": "--no-gc"})
    assert found.settings["gc_retention"].source == "cli --no-gc"


def test_what_can_be_switched_off_is_switched_off_with_the_word():
    file = {"http": {"listen": "h:1"}, "gc": {"retention": "1d"}, "worker": {"switch_interval": "1ms"}}
    config = loaded({"http": "off", "gc_retention": "off", "switch_interval": "off"}, file=file).config
    assert (config.http, config.gc_retention, config.switch_interval) == (None, None, None)


def test_lock_connections_follow_the_queues_up_to_a_bound_unless_they_are_given():
    assert loaded({"queues": "a=5,b=6"}).config.lock_connection_limit == 11
    assert loaded({"queues": "a=500"}).config.lock_connection_limit == 32
    assert loaded({"queues": "a=500", "lock_connections": "100"}).config.lock_connection_limit == 100


def test_an_address_is_taken_apart():
    assert loaded({"http": "127.0.0.1:9464"}).config.http_address == ("127.0.0.1", 9464)
    assert loaded({"http": "[::1]:0"}).config.http_address == ("::1", 0)
    assert loaded().config.http_address is None


def test_a_setting_is_shown_as_it_was_written_and_json_can_say_it():
    shown = {name: setting.value for name, setting in loaded({"lease": "2m", "fsms": "a"}, file=FILE).settings.items()}
    assert shown["lease"] == "2m"
    assert shown["fsms"] == ["a"]
    assert shown["queues"] == {"default": 10, "check-out": 5}
    assert shown["embedded_home"] == "/srv/pg"
    assert loaded().settings["lease"].value == "60s"


# What is refused.

LAYERS = [
    ({"lease": "60"}, {}, None, r"worker\.lease: '60' is no duration: write .*500ms.*\(from cli --lease\)"),
    (
        {},
        {"GENDURABLE_LEASE": "1w"},
        None,
        r"worker\.lease: '1w' is no duration.*\(from environment GENDURABLE_LEASE\)",
    ),
    (
        {},
        {},
        {"worker": {"lease": 60}},
        r'worker\.lease: 60 has no unit: write .*"30s".*\(from file gendurable\.toml\)',
    ),
    ({}, {}, {"worker": {"lease": True}}, r"worker\.lease: True is no text"),
    ({"lease": "0s"}, {}, None, "not longer than nothing: give more"),
    ({"lease": "-5s"}, {}, None, "is no duration"),
    ({"lease": "nan"}, {}, None, "is no duration"),
    ({"lease": "1e3s"}, {}, None, "is no duration"),
    ({"lease": "999999999d"}, {}, None, "give at most 36525 days"),
    (
        {"lease": "30s"},
        {},
        None,
        r"heartbeat 20s \(from default\) times 3 is longer than worker\.lease 30s \(from cli --lease\)",
    ),
    (
        {"poll": "6s"},
        {},
        None,
        r"worker\.poll 6s \(from cli --poll\) is longer than worker\.max_poll 5s \(from default\)",
    ),
    ({"queues": "default"}, {}, None, "queues: 'default' has no size: write 'default=10'"),
    ({"queues": "a=0"}, {}, None, "size of queue 'a': 0 is out of range: give a number from 1 to 1000"),
    ({"queues": "a=1001"}, {}, None, "1001 is out of range"),
    ({"queues": "a=ten"}, {}, None, "'ten' is no whole number"),
    ({"queues": "a=1,a=2"}, {}, None, "queue 'a' is named twice"),
    ({"queues": "=3"}, {}, None, "is empty; give 1 to 255 bytes"),
    ({"queues": ","}, {}, None, "no queue is named: write them as default=10,checkout=5"),
    ({"queues": "a\x07=3"}, {}, None, "unprintable"),
    ({}, {}, {"queues": 5}, "queues: 5 names no queues"),
    ({}, {}, {"queues": {"a": True}}, "size of queue 'a': True is no whole number"),
    ({}, {}, {"queues": {"a": 2.0}}, r"size of queue 'a': 2\.0 is no whole number"),
    ({}, {}, {"fsms": [1]}, r"fsms: \[1\] is no list of dotted paths"),
    ({"prefetch": "-1"}, {}, None, "-1 is out of range: give a number from 0 to 10000, or auto"),
    ({"prefetch": "lots"}, {}, None, "'lots' is no whole number: .*, or auto"),
    ({"min_demand": "0"}, {}, None, "min_demand: 0 is out of range"),
    ({"processes": "0"}, {}, None, "processes: 0 is out of range"),
    ({"processes": "9" * 30}, {}, None, "is no whole number"),
    ({"http": "9464"}, {}, None, r"http\.listen: '9464' is no address: write HOST:PORT, such as 127\.0\.0\.1:9464"),
    ({"http": "h:99999"}, {}, None, "is no address"),
    ({"http": "::1:80"}, {}, None, r"such as .* or \[::1\]:9464"),
    ({"log_level": "loud"}, {}, None, r"log\.level: 'loud' is unknown: write debug, info, warning or error"),
    ({"log_format": "xml"}, {}, None, "write auto, console or json"),
    ({"schema": ""}, {}, None, "'' is no schema name: give 1 to 63 bytes"),
    ({"schema": "x" * 64}, {}, None, "is no schema name"),
    ({"schema": "a\0"}, {}, None, "NUL"),
    ({"schema": "a\udc80"}, {}, None, "is not UTF-8"),
    ({"name": ""}, {}, None, r"worker\.name: '' is empty"),
    ({}, {"GENDURABLE_PREPARE": "maybe"}, None, "prepare: 'maybe' is neither true nor false"),
    ({}, {}, {"gc": {"batch": 0}}, r"gc\.batch: 0 is out of range"),
    ({}, {}, {"embedded": {"home": " "}}, "is empty: give a path"),
    (
        {},
        {},
        {"limits": {"json_depth": 1000}},
        r"limits\.json_depth: 1000 is out of range: give a number from 1 to 400",
    ),
    ({}, {}, {"limits": {"name_bytes": 1000, "key_bytes": 2000}}, "together pass 2600, what an index entry can hold"),
    ({}, {}, {"leese": "1s"}, r"leese: no such setting in gendurable\.toml; did you mean worker\.lease\?"),
    ({}, {}, {"lease": "60s"}, r"lease: no such setting in gendurable\.toml; did you mean worker\.lease\?"),
    ({}, {}, {"worker": {"leese": "1s"}}, r"worker\.leese: .* did you mean worker\.lease\?"),
    ({}, {}, {"woker": {"lease": "1s"}}, r"woker: .* did you mean worker\?"),
    ({}, {}, {"wombat": 1}, "wombat: no such setting in gendurable.toml; the settings are dsn, lock_dsn, "),
    ({}, {}, {"http": "h:1"}, r"http: 'h:1' is no table; write \[http\] and below it listen = "),
    ({}, {}, {"worker": {"http": "h:1"}, "http": {"listen": "h:2"}}, "the same setting as .*; give it once"),
    ({}, {}, {"worker": {"max-poll": "2s", "max_poll": "3s"}}, "give it once"),
    ({}, {"GENDURABLE_QUEUE": "a=1"}, None, r"GENDURABLE_QUEUE: no such variable; did you mean GENDURABLE_QUEUES\?"),
    ({}, {"GENDURABLE_DNS": "x"}, None, "did you mean GENDURABLE_DSN"),
    ({}, {"GENDURABLE_MAXPOLL": "1s"}, None, "did you mean GENDURABLE_MAX_POLL"),
    ({}, {"GENDURABLE_CONFIGS": "x"}, None, "did you mean GENDURABLE_CONFIG"),
]


@pytest.mark.parametrize(("cli", "env", "file", "complaint"), LAYERS)
def test_what_is_impossible_is_refused_in_one_line(cli, env, file, complaint):
    message = refusal(cli, env, file)
    assert re.search(complaint, message), message
    assert message.isprintable()


def test_variables_that_belong_to_others_are_left_alone():
    env = {
        "GENDURABLE_TEST_DSN": "x",
        "GENDURABLE_HYPOTHESIS_PROFILE": "x",
        "GENDURABLE_HOME": "x",
        "GENDURABLE_PG_BIN": "x",
        "GENDURABLE_CONFIG": "x",
        "GENDURABLE_LIST_LIMIT": "5",
        "GENDURABLE_WAIT_TIMEOUT": "5s",
        # What Kubernetes sets for a service of our name.
        "GENDURABLE_PORT": "tcp://10.0.0.1:9464",
        "GENDURABLE_PORT_9464_TCP_ADDR": "10.0.0.1",
        "GENDURABLE_SERVICE_HOST": "10.0.0.1",
        "GENDURABLE_SERVICE_PORT": "9464",
    }
    assert loaded(env=env, commands=["list", "wait"])


@pytest.mark.parametrize("layer", ["cli", "env", "file"])
def test_a_dsn_that_is_refused_is_not_repeated(layer):
    dsn = "postgresql://u:hidden\0@h/d"
    layers = {"cli": ({"dsn": dsn},), "env": ({}, {"DATABASE_URL": dsn}), "file": ({}, {}, {"dsn": dsn})}
    assert "hidden" not in refusal(*layers[layer])
    assert "hidden" not in refusal({}, {}, {"dsn": ["hidden"]})


def test_the_pure_configuration_needs_no_driver():
    code = "import sys, gendurable.config; assert not {'psycopg', 'cattrs', 'click'} & set(sys.modules), sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# Schedules.


def schedule(**about: Any) -> dict[str, Any]:
    return {"schedules": {"a": {"cron": "0 3 * * *", "fsm": "f", **about}}}


@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        ({"schedules": 7}, "schedules: 7 is no table: write one for each name, and in it cron = … and fsm = …"),
        ({"schedules": {"a": "x"}}, "schedules: a: 'x' is no table: write cron = … and fsm = … in one of that name"),
        ({"schedules": {"a": {"cron": "0 3 * * *"}}}, "schedules: a.fsm is missing: write cron = … and fsm = …"),
        (schedule(corn="0 3 * * *"), "schedules: a.corn: no such setting; did you mean cron?"),
        (schedule(cron="0 3 * *"), "schedules: a.cron: '0 3 * *' has not five fields"),
        (schedule(cron=3), "schedules: a.cron: 3 is no text: put it in quotes"),
        (schedule(timezone="Europe/Atlantis"), "schedules: a.timezone: 'Europe/Atlantis' is no time zone here"),
        (schedule(state=[1]), "schedules: a.state: [1] is no table: write the state as { name = value }"),
        (schedule(version=0), "schedules: a.version: 0 is out of range"),
        (schedule(priority=40_000), "schedules: a.priority: 40000 is out of range"),
        (schedule(queue=""), "schedules: a.queue: '' is empty"),
        (schedule(catch_up="never"), "schedules: a.catch_up: 'never' is unknown: write skip, latest or all"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_by_name(file: dict[str, Any], complaint: str):
    assert complaint in refusal({}, {}, file)


def test_schedules_are_shown_as_the_file_has_them():
    assert loaded(file=FILE).settings["schedules"].value == {
        "nightly": FILE["schedules"]["nightly"] | {"state": {"kind": "short", "since": "2031-01-01"}},
        "hourly": {
            "cron": "0 * * * *",
            "timezone": "UTC",
            "fsm": "sweep",
            "state": {},
            "priority": 0,
            "catch_up": "skip",
        },
    }


# Secrets.

HIDDEN = [
    "postgresql://u:hidden@h:5432/d",
    "postgresql://u:hid%20den@h/d?sslmode=require",
    "postgres://u:hidd@en@h/d",
    "postgres://u:hid/den@h/d",
    "postgres://u:hid?den@h/d",
    "postgresql:///d?user=u&password=hidden&host=h",
    "postgresql:///d?sslpassword=hidden",
    "host=h password=hidden dbname=d",
    "host=h password='hid den' dbname=d",
    r"host=h password='hid\'den' dbname=d",
    r"host=h password=hid\ den",
    "host=h PASSWORD = hidden",
    "host=h oauth_client_secret=hidden",
    "password='hid den",
]


@pytest.mark.parametrize("dsn", HIDDEN)
def test_no_password_is_shown(dsn):
    shown = mask_dsn(dsn)
    assert "hid" not in shown
    assert "den" not in shown
    assert MASK in shown
    assert any(secret.startswith("hid") for secret in secrets_in(dsn))
    assert loaded({"dsn": dsn, "lock_dsn": dsn}).settings["dsn"].value == shown


@pytest.mark.parametrize("dsn", ["", "dbname=d host=h", "postgresql://u@h:5432/d?sslmode=require", "postgresql:///d"])
def test_a_dsn_without_a_password_is_shown_as_it_is(dsn):
    assert mask_dsn(dsn) == dsn
    assert secrets_in(dsn) == []


# Durations.


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("30s", 30), ("10m", 600), ("2h", 7200), ("7d", 604_800), ("1.5s", 1.5), (" 3 s ", 3), ("0s", 0)],
)
def test_a_duration_is_a_number_with_a_unit(text, seconds):
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "text", ["", "5", "s", "5 minutes", "1h30m", "٣s", "5S", "-1s", "+1s", "0x1s", "1_000s", "inf s"]
)
def test_anything_else_is_no_duration(text):
    with pytest.raises(ValueError, match="is no duration: write a number with a unit"):
        parse_duration(text)


@given(st.integers(1, 10**10))
def test_a_duration_that_was_written_is_read_back(milliseconds: int):
    duration = timedelta(milliseconds=milliseconds)
    assert parse_duration(format_duration(duration)) == duration


# Limits.


def test_configured_limits_hold_for_every_check_that_is_not_told_otherwise():
    before = attrs.evolve(DEFAULT_LIMITS)
    try:
        apply_limits(loaded(file={"limits": {"name_bytes": 3}}).config.limits)
        assert check_name("queue", "abc") == "abc"
        with pytest.raises(InvalidInstance, match="has 4 bytes; give at most 3"):
            check_name("queue", "abcd")
    finally:
        apply_limits(before)
    assert check_name("queue", "abcd") == "abcd"
