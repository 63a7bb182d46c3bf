"""Which machines a worker runs: (name, version) -> machine. Only listed modules are ever imported."""

import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, TypeAlias

from gendurable.core.fsm import FSM, Definition, definition
from gendurable.errors import DefinitionError, DuplicateMachine, LoadError, describe

Machine: TypeAlias = FSM[Any]
Source: TypeAlias = "Machine | type[Machine] | Registry | ModuleType | str"


class Registry:
    """The machines of one process, each (name, version) once."""

    def __init__(self, sources: "Source | Iterable[Source]" = ()) -> None:
        """Gather machines from instances, classes, other registries, modules and dotted paths, or from one of them."""
        self._machines: dict[tuple[str, int], Machine] = {}
        several: Any = sources if isinstance(sources, Iterable) and not isinstance(sources, str) else [sources]
        found = [machine for source in several for machine in _expand(source)]
        instances = [machine for machine in found if isinstance(machine, FSM)]
        # An instance stands for its class: a module holds both when a machine needs collaborators.
        covered = {type(machine) for machine in instances}
        classes = [machine for machine in found if not isinstance(machine, FSM) and machine not in covered]
        for machine in [*instances, *(_instantiate(machine) for machine in dict.fromkeys(classes))]:
            self._add(machine)

    def _add(self, machine: Machine) -> None:
        mine = definition(type(machine))
        other = self._machines.setdefault((mine.name, mine.version), machine)
        if other is not machine:
            raise DuplicateMachine(
                f"two machines are named {mine.name!r} version {mine.version}: {_path(other)} and {_path(machine)}; "
                "give one of them another name or version"
            )

    def get(self, name: str, version: int) -> Machine | None:
        """Return the machine of that name and version, if this process has it."""
        return self._machines.get((name, version))

    def find(self, name: str, version: int | None) -> Machine | None:
        """Return the machine of that name and version, the newest one if none is said."""
        newest = max((number for each, number in self._machines if each == name), default=0)
        return self.get(name, newest if version is None else version)

    @property
    def machines(self) -> Mapping[tuple[str, int], Machine]:
        """The machines by name and version."""
        return self._machines

    @property
    def capabilities(self) -> list[str]:
        """What the claim may pick: `name@version` of each machine."""
        return [f"{name}@{version}" for name, version in self._machines]

    def __iter__(self) -> Iterator[Machine]:
        return iter(self._machines.values())

    def __len__(self) -> int:
        return len(self._machines)


def load(paths: Iterable[str]) -> Registry:
    """Import dotted paths (`shop.machines`, `shop.machines:registry`) and gather their machines."""
    return Registry(paths)


def _expand(source: Source) -> Iterable[Machine | type[Machine]]:
    if isinstance(source, str):
        return _import(source)
    if isinstance(source, Registry):
        return source
    if isinstance(source, ModuleType):
        return _of_module(source, source.__name__)
    if isinstance(source, FSM):
        return [source]
    if isinstance(source, type) and issubclass(source, FSM):
        try:
            definition(source)
        except DefinitionError as error:
            raise LoadError(str(error)) from None
        return [source]
    raise LoadError(
        f"{source!r} is no machine: give an FSM class, an instance of one, a Registry, a module or a dotted path"
    )


def _import(path: str) -> Iterable[Machine | type[Machine]]:
    module_name, _, attribute = path.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")) or (":" in path and not attribute):
        raise LoadError(f"{path!r} is no dotted path: write package.module or package.module:attribute")
    if "" not in sys.path and sys.path[0:1] != ["."]:
        # As with other Python daemons, the current directory is importable.
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and not error.code:
            raise  # somebody asked this process to end while it was loading
        raise LoadError(f"cannot import {module_name!r}: {describe(error)}") from error
    if not attribute:
        return _of_module(module, path)
    try:
        value = getattr(module, attribute)
    except AttributeError:
        raise LoadError(f"module {module_name!r} has no attribute {attribute!r}") from None
    if isinstance(value, str):
        raise LoadError(f"{path} is a text, no machine")
    return _expand(value)


def _of_module(module: ModuleType, path: str) -> list[Machine | type[Machine]]:
    found: list[Machine | type[Machine]] = []
    for value in vars(module).values():
        if isinstance(value, FSM | Registry):
            found.extend(_expand(value))
        elif isinstance(value, type) and issubclass(value, FSM) and _is_concrete(value):
            found.append(value)
    if not found:
        raise LoadError(f"module {path!r} holds no machine: no FSM class with steps, no instance and no Registry")
    return found


def _is_concrete(machine: type[Machine]) -> bool:
    try:
        definition(machine)
    except DefinitionError:
        return False
    return True


def _instantiate(machine: type[Machine]) -> Machine:
    try:
        return machine()
    except Exception as error:
        raise LoadError(
            f"cannot make an instance of {machine.__module__}.{machine.__qualname__}: {describe(error)}; if it needs "
            "arguments, put an instance or a Registry into the module"
        ) from error


def _path(machine: Machine) -> str:
    return f"{type(machine).__module__}.{type(machine).__qualname__}"


__all__ = ["Definition", "Machine", "Registry", "load"]
