"""Which machines a process has: dotted paths, and what they may lead to."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from support import row

from gendurable import FSM, Done, Job, Registry, step
from gendurable.core.registry import load
from gendurable.db.connection import Connection
from gendurable.errors import DuplicateMachine, LoadError
from gendurable.testing import Harness

HEAD = "from attrs import frozen\nfrom gendurable import FSM, Job, Done, Registry, step\n"

ONE = """
class One(FSM[dict], name="one"):
    @step
    def start(self, ctx):
        return Done()
"""

TWO = """
class Two(Job[dict], name="two", version=2):
    def perform(self, ctx): ...
"""

NEEDY = """
@frozen
class Needy(FSM[dict], name="needy"):
    carrier: str

    @step
    def start(self, ctx):
        return Done({"carrier": self.carrier})
"""


class Local(FSM[dict], name="local"):
    @step
    def start(self, ctx):
        return Done()


class LocalTwin(FSM[dict], name="local"):
    @step
    def start(self, ctx):
        return Done()


class LocalNext(Local, name="local", version=2): ...


class LocalBase(Job[dict]): ...


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Write modules of a new package and return the package's name; it is forgotten after the test."""
    package = f"shop_{uuid4().hex[:8]}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", sys.modules.copy())

    def write_modules(**modules: str) -> str:
        for name, body in modules.items():
            (tmp_path / package / f"{name}.py").write_text(HEAD + body)
        importlib.invalidate_caches()
        return package

    return write_modules


def names(registry: Registry) -> set[str]:
    return set(registry.capabilities)


def test_a_module_gives_every_concrete_class(write: Callable[..., str]):
    shop = write(machines=ONE + TWO + "class Base(FSM[dict]): ...\nother = 5\n")
    assert names(load([f"{shop}.machines"])) == {"one@1", "two@2"}


def test_a_module_itself_is_a_source(write: Callable[..., str]):
    shop = write(machines=ONE + TWO)
    assert names(Registry([importlib.import_module(f"{shop}.machines")])) == {"one@1", "two@2"}


def test_a_package_is_a_module_too(write: Callable[..., str], tmp_path: Path):
    shop = write(machines=ONE)
    (tmp_path / shop / "__init__.py").write_text("from .machines import One\n")
    assert names(load([shop])) == {"one@1"}


def test_a_module_gives_its_instances_and_the_machines_of_its_registries(write: Callable[..., str]):
    shop = write(machines=ONE + TWO + NEEDY + 'needy = Needy("boat")\n', other=f"from {'{}'}.machines import *\n")
    assert names(load([f"{shop}.machines"])) == {"one@1", "two@2", "needy@1"}
    assert load([f"{shop}.machines"]).get("needy", 1).carrier == "boat"


def test_an_instance_stands_for_its_class(write: Callable[..., str]):
    shop = write(machines=NEEDY + 'needy = Needy("boat")\n')
    module = importlib.import_module(f"{shop}.machines")
    (machine,) = load([f"{shop}.machines"])
    assert machine is module.needy


@pytest.mark.parametrize("order", [1, -1], ids=["class first", "instance first"])
def test_an_instance_stands_for_its_class_from_whichever_source(order: int):
    machine = Local()
    assert list(Registry([Local, machine][::order])) == [machine]


def test_a_class_listed_twice_is_one_machine(write: Callable[..., str]):
    shop = write(machines=ONE)
    paths = [f"{shop}.machines", f"{shop}.machines", f"{shop}.machines:One"]
    assert names(load(paths)) == {"one@1"}
    assert len(Registry([Local, Local])) == 1


def test_a_registry_in_a_module_is_taken_with_its_very_machines(write: Callable[..., str]):
    shop = write(machines=ONE + NEEDY + 'registry = Registry([One, Needy("boat")])\n')
    module = importlib.import_module(f"{shop}.machines")
    whole, attribute = load([f"{shop}.machines"]), load([f"{shop}.machines:registry"])
    assert list(whole) == list(attribute) == list(module.registry)


@pytest.mark.parametrize(
    ("attribute", "expected"),
    [("One", {"one@1"}), ("two", {"two@2"}), ("registry", {"one@1", "two@2"})],
    ids=["class", "instance", "registry"],
)
def test_one_attribute_gives_only_what_it_names(write: Callable[..., str], attribute: str, expected: set[str]):
    shop = write(machines=ONE + TWO + "two = Two()\nregistry = Registry([One, two])\n")
    assert names(load([f"{shop}.machines:{attribute}"])) == expected


def test_several_paths_are_gathered(write: Callable[..., str]):
    shop = write(first=ONE, second=TWO)
    assert names(load([f"{shop}.first", f"{shop}.second"])) == {"one@1", "two@2"}
    assert names(Registry([f"{shop}.first", Local, Registry([f"{shop}.second"])])) == {"one@1", "two@2", "local@1"}


def test_a_path_to_part_of_a_module_does_not_need_the_rest_of_it(write: Callable[..., str]):
    shop = write(machines=ONE + NEEDY)
    assert names(load([f"{shop}.machines:One"])) == {"one@1"}


def test_two_versions_of_one_machine_live_side_by_side():
    registry = Registry([Local, LocalNext])
    assert names(registry) == {"local@1", "local@2"}
    assert type(registry.get("local", 1)) is Local
    assert type(registry.get("local", 2)) is LocalNext
    assert registry.get("local", 3) is None
    assert registry.get("other", 1) is None


def test_an_empty_registry_has_no_machines():
    assert len(Registry()) == 0
    assert names(Registry()) == set()


# What is refused.


@pytest.mark.parametrize("sources", [[Local, LocalTwin], [Local(), Local()], [Registry([Local]), LocalTwin()]])
def test_two_machines_of_one_name_and_version_are_refused_by_both_paths(sources: list[Any]):
    with pytest.raises(DuplicateMachine, match="'local' version 1") as refusal:
        Registry(sources)
    assert str(refusal.value).count(f"{__name__}.Local") == 2


def test_duplicates_across_modules_are_refused(write: Callable[..., str]):
    shop = write(first=ONE, second=ONE)
    with pytest.raises(DuplicateMachine, match=rf"{shop}\.first\.One and {shop}\.second\.One"):
        load([f"{shop}.first", f"{shop}.second"])


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("raise ValueError('boom')", "ValueError: boom"),
        ("import nonexistent_dependency", "nonexistent_dependency"),
        ("def broken(:", "SyntaxError"),
        ("class Bad(FSM[dict], version=0):\n    @step\n    def start(self, ctx): ...", "Bad has version=0"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named_with_the_reason(
    write: Callable[..., str], body: str, complaint: str
):
    shop = write(broken=body)
    with pytest.raises(LoadError, match=f"cannot import '{shop}.broken'") as refusal:
        load([f"{shop}.broken"])
    assert complaint in str(refusal.value)


def test_a_module_that_does_not_exist_is_named():
    with pytest.raises(LoadError, match=r"cannot import 'no_such_shop\.machines'"):
        load(["no_such_shop.machines"])


def test_an_attribute_that_does_not_exist_is_named(write: Callable[..., str]):
    shop = write(machines=ONE)
    with pytest.raises(LoadError, match=rf"module '{shop}\.machines' has no attribute 'registry'"):
        load([f"{shop}.machines:registry"])


@pytest.mark.parametrize("value", ["5", "'text'", "[One]", "None", "len", "dict", "One.start"])
def test_an_attribute_that_is_no_machine_is_refused(write: Callable[..., str], value: str):
    shop = write(machines=ONE + f"thing = {value}\n")
    with pytest.raises(LoadError, match="no machine"):
        load([f"{shop}.machines:thing"])


def test_an_attribute_that_is_a_base_is_refused_as_such(write: Callable[..., str]):
    shop = write(machines="class Base(FSM[dict]): ...\n")
    with pytest.raises(LoadError, match="Base defines no steps"):
        load([f"{shop}.machines:Base"])


def test_a_module_without_machines_is_refused(write: Callable[..., str]):
    shop = write(machines="class Base(FSM[dict]): ...\nx = 1\n")
    with pytest.raises(LoadError, match=rf"module '{shop}\.machines' holds no machine"):
        load([f"{shop}.machines"])


def test_a_class_that_needs_arguments_is_refused_with_the_way_out(write: Callable[..., str]):
    shop = write(machines=NEEDY)
    with pytest.raises(LoadError, match=rf"instance of {shop}\.machines\.Needy: TypeError.*carrier.*put an instance"):
        load([f"{shop}.machines"])


@pytest.mark.parametrize(
    "path",
    ["", ":", "shop:", ":registry", "shop.", ".shop", "shop..machines", "shop/machines.py", "shop machines", "a-b"],
)
def test_a_text_that_is_no_dotted_path_is_refused(path: str):
    with pytest.raises(LoadError, match="is no dotted path"):
        load([path])


def test_a_lone_source_needs_no_list():
    for lone in (Local, Local(), Registry([Local])):
        assert [type(machine) for machine in Registry(lone)] == [Local]


@pytest.mark.parametrize("source", [5, None, object, len, ["a.b"], Local.start])
def test_anything_else_is_no_source(source: Any):
    with pytest.raises(LoadError, match="is no machine"):
        Registry([source])


@pytest.mark.parametrize("base", [FSM, Job, LocalBase])
def test_an_abstract_base_is_no_machine(base: type[FSM[Any]]):
    with pytest.raises(LoadError, match=f"{base.__name__} defines no steps"):
        Registry([base])


# Where modules are found.


def test_the_current_directory_is_importable(
    write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shop = write(machines=ONE)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", ".", str(tmp_path))])
    with pytest.raises(LoadError):
        load([f"{shop}.machines"])
    monkeypatch.chdir(tmp_path)
    assert names(load([f"{shop}.machines"])) == {"one@1"}


def test_a_name_in_a_row_never_causes_an_import(
    write: Callable[..., str], harness: Callable[..., Harness], conn: Connection
):
    shop = write(machines=ONE, trap="TRAP = True\nclass Trap(FSM[dict]):\n    @step\n    def start(self, ctx): ...\n")
    durable = harness(f"{shop}.machines")
    ids = [
        conn.execute("insert into gen_durable (fsm, step) values (%s, 'start') returning id", [name]).fetchone()[0]
        for name in (f"{shop}.trap.Trap", f"{shop}.trap", f"{shop}.trap:Trap")
    ]
    mine = conn.execute("insert into gen_durable (fsm, step) values ('one', 'start') returning id").fetchone()[0]
    assert durable.drain() == {"done": 1}
    assert row(conn, mine)["status"] == "done"
    assert f"{shop}.trap" not in sys.modules
    for each in ids:
        untouched = row(conn, each)
        assert (untouched["status"], untouched["attempt"], untouched["fence"]) == ("runnable", 0, 0)
