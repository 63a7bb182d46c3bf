"""Between Python values and the JSON text that is stored.

Writing goes by the value: `_plain` turns it into what JSON has and checks it, in one walk. Reading a state goes by
the declared class: cattrs structures what `json` parsed. How values that JSON does not have are written:

    datetime, date, time    ISO 8601 text             Enum                its value
    timedelta               seconds, as a float       attrs, dataclass    an object of its init fields
    Decimal, UUID           text                      tuple               a list
    bytes                   base64 text               set, frozenset      a sorted list
"""

import base64
import dataclasses
import difflib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence, MutableSet, Sequence
from collections.abc import Set as AbstractSet
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, Flag
from functools import cache
from itertools import chain
from types import GenericAlias, NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NoReturn,
    NotRequired,
    Required,
    TypeAlias,
    TypedDict,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)
from uuid import UUID

import attrs
from cattrs import Converter
from cattrs.cols import list_structure_factory, mapping_structure_factory
from cattrs.disambiguators import create_default_dis_func
from cattrs.errors import (
    BaseValidationError,
    ClassValidationError,
    ForbiddenExtraKeysError,
    IterableValidationError,
    IterableValidationNote,
    StructureHandlerNotFoundError,
)

from gendurable.core.limits import DEFAULT_LIMITS, Limits, show
from gendurable.errors import DefinitionError, InvalidState, UndecodableRow, Unstorable, describe

S = TypeVar("S")


# Values to text.


def encode_value(value: Any, *, what: str, limits: Limits = DEFAULT_LIMITS) -> str:
    """Return any storable value as JSON text; `what` begins the path in errors."""
    return _text(_checked(value, what, limits), what, limits)


def encode_object(value: Any, *, what: str, limits: Limits = DEFAULT_LIMITS) -> str:
    """Return a mapping, attrs or dataclass instance as the text of a JSON object."""
    plain = _checked(value, what, limits)
    if type(plain) is not dict:
        raise Unstorable(f"{what}: expected a mapping or an attrs or dataclass instance, got {show(value)}")
    return _text(plain, what, limits)


def _checked(value: Any, what: str, limits: Limits) -> Any:
    try:
        return _plain(value, limits.json_depth, limits.integer_bits)
    except _Refused as refused:
        raise Unstorable(f"{_path(what, reversed(refused.path))}: {refused}") from None
    except RecursionError:
        # The caller's own stack was nearly full.
        raise Unstorable(f"{what}: {_TOO_DEEP}") from None


# `_plain` returns a fresh tree, so there are no cycles to look for.
_dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")).encode


def _text(plain: Any, what: str, limits: Limits) -> str:
    text = _dumps(plain)
    size = len(text) if text.isascii() else len(text.encode())
    if size > limits.json_bytes:
        raise Unstorable(
            f"{what}: {size} bytes of JSON, the limit is {limits.json_bytes}; "
            "keep large data elsewhere and store a reference to it"
        )
    return text


class _Refused(Exception):
    """A value cannot be stored; each container on the way out adds its part of the path, innermost first."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.path: list[Any] = []


# Takes a value, how many levels may still open, and how many bits an integer may have.
_Writer: TypeAlias = Callable[[Any, int, int], Any]

_TOO_DEEP = "nested too deeply, or containing itself; flatten it"


def _plain(value: Any, room: int, bits: int) -> Any:
    """Return `value` made only of what JSON has, or refuse it."""
    return _WRITERS[type(value)](value, room, bits)


class _Writers(dict[type, _Writer]):
    """What writes values of a class; looked for once for each class, so the walk itself decides nothing."""

    def __missing__(self, kind: type) -> _Writer:
        writer = self[kind] = self._found(kind)
        return writer

    def _found(self, kind: type) -> _Writer:
        if issubclass(kind, Enum):  # before str and int, which an Enum may also be
            return lambda member, room, bits: _plain(member.value, room, bits)
        names = _field_names(kind)
        if names is not None:
            return _fields_writer(names)
        for base in kind.__mro__:
            if base in self:
                return self[base]
        if issubclass(kind, Mapping):
            return _write_mapping
        raise _Refused(f"a value of type {_type_name(kind)} cannot be stored as JSON; convert it to plain values")


def _write_str(value: str, _room: int = 0, _bits: int = 0) -> str:
    if "\0" in value:
        raise _Refused("a NUL character, which Postgres cannot store; leave it out")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _Refused("a lone surrogate, which UTF-8 cannot write; decode the text properly") from None
    return str.__str__(value)  # as a plain str, if of a subclass


def _write_int(value: int, _room: int, bits: int) -> int:
    if value.bit_length() > bits:
        raise _Refused(f"an integer of {value.bit_length()} bits, the limit is {bits}; store it as text")
    return int.__int__(value)


def _write_float(value: float, _room: int, _bits: int) -> float:
    if not math.isfinite(value):
        raise _Refused(f"{float.__repr__(value)} is no JSON number; use None or a text")
    return float.__float__(value)


def _write_list(value: Iterable[Any], room: int, bits: int) -> list[Any]:
    if not room:
        raise _Refused(_TOO_DEEP)
    plain: list[Any] = []
    try:
        for item in value:
            plain.append(_plain(item, room - 1, bits))  # noqa: PERF401  its length is the path
    except _Refused as refused:
        refused.path.append(len(plain))
        raise
    return plain


def _write_set(value: AbstractSet[Any], room: int, bits: int) -> list[Any]:
    plain = _write_list(value, room, bits)
    try:
        plain.sort()
    except TypeError:  # of mixed types: any order, as long as it is always the same
        plain.sort(key=_dumps)
    return plain


def _write_mapping(value: Mapping[Any, Any], room: int, bits: int) -> dict[str, Any]:
    if not room:
        raise _Refused(_TOO_DEEP)
    plain = {}
    key = None
    try:
        for key, item in value.items():
            if not isinstance(key, str):
                raise _Refused(f"the key is of type {type(key).__name__}; JSON keys are text, use str")  # noqa: TRY301
            plain[_write_str(key)] = _plain(item, room - 1, bits)
    except _Refused as refused:
        refused.path.append(key)
        raise
    return plain


def _fields_writer(names: tuple[str, ...]) -> _Writer:
    def write(value: Any, room: int, bits: int) -> dict[str, Any]:
        if not room:
            raise _Refused(_TOO_DEEP)
        plain = {}
        name = ""
        try:
            for name in names:
                plain[name] = _plain(getattr(value, name), room - 1, bits)
        except _Refused as refused:
            refused.path.append(name)
            raise
        return plain

    return write


def _field_names(cl: type) -> tuple[str, ...] | None:
    """Return the fields that make up an attrs class or dataclass, None for others."""
    if attrs.has(cl):
        return tuple(field.name for field in attrs.fields(cl) if field.init)
    if dataclasses.is_dataclass(cl):
        return tuple(field.name for field in dataclasses.fields(cl) if field.init)
    return None


_WRITERS = _Writers(
    {
        NoneType: lambda value, _room, _bits: value,
        bool: lambda value, _room, _bits: value,
        int: _write_int,
        float: _write_float,
        str: _write_str,
        bytes: lambda value, _room, _bits: base64.b64encode(value).decode(),
        datetime: lambda value, _room, _bits: value.isoformat(),
        date: lambda value, _room, _bits: value.isoformat(),
        time: lambda value, _room, _bits: value.isoformat(),
        timedelta: lambda value, _room, _bits: value.total_seconds(),
        Decimal: lambda value, _room, _bits: str(value),
        UUID: lambda value, _room, _bits: str(value),
        dict: _write_mapping,
        list: _write_list,
        tuple: _write_list,
        set: _write_set,
        frozenset: _write_set,
    }
)

_LONGEST_PATH = 20


def _path(what: str, keys: Iterable[Any]) -> str:
    parts = [_part(key) for key in keys]
    if len(parts) > _LONGEST_PATH:
        parts[_LONGEST_PATH // 2 : -_LONGEST_PATH // 2] = [" … "]
    return what + "".join(parts)


def _part(key: Any) -> str:
    if not isinstance(key, str):
        return f"[{show(key)}]"
    if key.isidentifier():
        return f".{key}"
    return f"[{json.dumps(key, ensure_ascii=not key.isprintable())}]"


# Text to values.


def decode_value(text: str, *, what: str) -> Any:
    """Return what stored JSON text says."""
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise UndecodableRow(f"{what}: the stored JSON cannot be read: {error}; correct the row by hand") from error


def decode_readable(text: str) -> Any:
    """Return what stored JSON text says, or the text itself if it cannot be read: a bad row must still be seen."""
    try:
        return decode_value(text, what="value")
    except UndecodableRow:
        return text


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


# Takes what JSON says and the declared type.
_Reader: TypeAlias = Callable[[Any, Any], Any]


# What a machine has to say about a state: None if it is well, the state to use instead, or an exception.
StateCheck: TypeAlias = Callable[[Any], object]


class StateCodec(Generic[S]):
    """Reads and writes the states of one machine."""

    def __init__(self, state_class: type[S]) -> None:
        """Refuse a class whose states could not be read back; names not defined yet are looked up at first use."""
        self.state_class = state_class
        self._instances = _instance_types(state_class)
        try:
            self._reader(strict=False)
        except DefinitionError as error:
            if not isinstance(error.__cause__, NameError):
                raise

    def encode(self, state: S, *, limits: Limits = DEFAULT_LIMITS) -> str:
        """Return a state as the text to store."""
        if not isinstance(state, self._instances):
            raise InvalidState(f"state: expected {_type_name(self.state_class)}, got {show(state)}")
        return encode_value(state, what="state", limits=limits)

    def decode(self, text: str, *, check: StateCheck | None = None) -> S:
        """Return a stored state; fields it lacks take their defaults, keys the class does not have are ignored.

        `check` is the machine's own word on it.
        """
        state = self._structure(decode_value(text, what="state"), strict=False)
        return state if check is None else self._judged(state, check, DEFAULT_LIMITS)

    def parse(
        self,
        value: S | Mapping[str, Any] | None,
        *,
        check: StateCheck | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> str:
        """Return the text to store for what a user gave as a state: an instance, a mapping, or None for `{}`.

        Either is written and read back, so a field of the wrong type is found here and not in the first step.
        """
        state = self._read({} if value is None else value, limits)
        judged = state if check is None else self._judged(state, check, limits)
        try:
            return encode_value(judged, what="state", limits=limits)
        except Unstorable as error:
            raise InvalidState(str(error)) from None

    def _read(self, given: object, limits: Limits) -> S:
        if not isinstance(given, (*self._instances, Mapping)):
            raise InvalidState(f"state: expected {_type_name(self.state_class)} or a mapping, got {show(given)}")
        try:
            return self._structure(_checked(given, "state", limits), strict=True)
        except Unstorable as error:
            raise InvalidState(str(error)) from None

    def _judged(self, state: S, check: StateCheck, limits: Limits) -> S:
        try:
            answer = check(state)
        except InvalidState:
            raise
        except Exception as error:
            raise InvalidState(f"state: refused by validate: {describe(error)}") from error
        return state if answer is None else self._read(answer, limits)

    def _structure(self, plain: Any, *, strict: bool) -> S:
        try:
            state: S = self._reader(strict=strict)(plain, self.state_class)
        except (BaseValidationError, _Misfit, RecursionError) as error:
            raise InvalidState(_first_failure(error)) from error
        return state

    def _reader(self, *, strict: bool) -> _Reader:
        """Return what reads a state, from cattrs' own cache; rows are read leniently, users strictly."""
        try:
            return _converter(strict).get_structure_hook(self.state_class)
        except NameError as error:
            reason = f"{error}; define what a state class names at module level"
            raise self._unfit(reason) from error
        except StructureHandlerNotFoundError as error:
            culprit = _type_name(error.type_)
            reason = f"{culprit} cannot be read back from JSON; use plain types, attrs or dataclass classes"
            raise self._unfit(reason) from error
        except _Unreadable as error:
            raise self._unfit(error) from error

    def _unfit(self, reason: object) -> DefinitionError:
        return DefinitionError(f"{_type_name(self.state_class)}: {reason}")


def _instance_types(cl: Any) -> tuple[type, ...]:
    """Return what a state must be an instance of."""
    origin = get_origin(cl) or cl
    if origin in _UNIONS:
        return tuple(chain.from_iterable(map(_instance_types, get_args(cl))))
    if origin in _MAPPINGS or _is_typed_dict(cl):
        return (dict, Mapping)
    if _is_record(cl):
        return (origin,)
    raise DefinitionError(
        f"{_type_name(cl)} cannot be a state class: a state is a JSON object; "
        "use an attrs class, a dataclass, a TypedDict or dict"
    )


# Reading by declared class: cattrs' hooks. They are given what `json` or `_plain` made, so its types are exact.


@cache
def _converter(strict: bool) -> Converter:
    """Return the one converter that reads rows, or the strict one that also refuses unknown keys."""
    converter = Converter(forbid_extra_keys=strict, detailed_validation=True)
    for kind, reader in _SCALARS.items():
        converter.register_structure_hook(kind, reader)
    for is_meant, factory in _FACTORIES:
        converter.register_structure_hook_factory(is_meant, factory)
    return converter


class _Unreadable(Exception):
    """A declared type cannot be told from what JSON says."""


class _Misfit(Exception):
    """A value is not of the declared type."""

    def __init__(self, expected: str, value: Any) -> None:
        super().__init__(f"expected {expected}, got {show(value)}")


def _read_str(value: Any, cl: Any) -> Any:
    if type(value) is not str:
        raise _Misfit("a string", value)
    return value if cl is str else cl(value)  # subclasses and Enums of str arrive here too


def _read_int(value: Any, cl: Any) -> Any:
    if type(value) is not int:
        raise _Misfit("an integer", value)
    return value if cl is int else cl(value)


def _read_float(value: Any, cl: Any) -> Any:
    # jsonb gives 1e16 back as an integer.
    if type(value) is not float and type(value) is not int:
        raise _Misfit("a number", value)
    try:
        return cl(value)
    except OverflowError:
        raise _Misfit("a number that a float can hold", value) from None


def _read_bool(value: Any, _cl: Any) -> Any:
    if type(value) is not bool:
        raise _Misfit("true or false", value)
    return value


def _read_none(value: Any, _cl: Any) -> None:
    if value is not None:
        raise _Misfit("null", value)


def _read_timedelta(value: Any, cl: Any) -> Any:
    if type(value) is not float and type(value) is not int:
        raise _Misfit("a number of seconds", value)
    try:
        return cl(seconds=value)
    except OverflowError:
        raise _Misfit("a number of seconds that a timedelta can hold", value) from None


def _text_reader(expected: str, parse: Callable[[Any, str], Any]) -> _Reader:
    def read(value: Any, cl: Any) -> Any:
        if type(value) is not str:
            raise _Misfit(expected, value)
        try:
            return parse(cl, value)
        except (ValueError, ArithmeticError):
            raise _Misfit(expected, value) from None

    return read


_SCALARS: dict[type, _Reader] = {
    NoneType: _read_none,
    bool: _read_bool,
    int: _read_int,
    float: _read_float,
    str: _read_str,
    bytes: _text_reader("base64 text", lambda _cl, text: base64.b64decode(text, validate=True)),
    datetime: _text_reader("an ISO date and time", lambda cl, text: cl.fromisoformat(text)),
    date: _text_reader("an ISO date", lambda cl, text: cl.fromisoformat(text)),
    time: _text_reader("an ISO time", lambda cl, text: cl.fromisoformat(text)),
    timedelta: _read_timedelta,
    Decimal: _text_reader("a decimal number as text", lambda cl, text: cl(text)),
    UUID: _text_reader("a UUID as text", lambda cl, text: cl(text)),
}


def _only(json_type: type, read: _Reader) -> _Reader:
    """Refuse other JSON types first: cattrs would take a string for a list of its characters."""
    expected = _JSON_NAMES[json_type]

    def guarded(value: Any, cl: Any) -> Any:
        if type(value) is not json_type:
            raise _Misfit(expected, value)
        return read(value, cl)

    return guarded


def _record_reader(cl: Any, converter: Converter) -> _Reader:
    return _only(dict, converter.gen_structure_attrs_fromdict(cl))


def _typed_dict_reader(cl: Any, converter: Converter) -> _Reader:
    names = (get_origin(cl) or cl).__annotations__
    read = converter.gen_structure_typeddict(cl if get_origin(cl) else _with_known_keys(cl))
    # cattrs keeps unknown keys; a class would have dropped them.
    return _only(dict, lambda value, cl: {name: item for name, item in read(value, cl).items() if name in names})


@cache
def _with_known_keys(cl: Any) -> Any:
    """Return the TypedDict with its keys marked: where annotations are kept as text, Python overlooks the marks."""
    keys = {}
    for name, hint in get_type_hints(cl, include_extras=True).items():
        marked = get_origin(hint) in (Required, NotRequired)
        keys[name] = hint if marked else Required[hint] if name in cl.__required_keys__ else NotRequired[hint]
    return TypedDict(cl.__name__, keys)  # type: ignore[operator]


def _mapping_reader(cl: Any, converter: Converter) -> _Reader:
    if not get_args(cl):
        return _only(dict, lambda value, _cl: value)
    return _only(dict, mapping_structure_factory(cl, converter, structure_to=dict))


def _array_reader(cl: Any, converter: Converter) -> _Reader:
    make = _ARRAYS[get_origin(cl) or cl]
    args = get_args(cl)
    if get_origin(cl) is tuple and args and args[-1] is not Ellipsis:
        return _fixed_tuple_reader(args, converter)
    as_list: Any = GenericAlias(list, args[:1] or (Any,))
    read = _only(list, list_structure_factory(as_list, converter))
    return read if make is list else lambda value, cl: make(read(value, cl))


def _fixed_tuple_reader(kinds: tuple[Any, ...], converter: Converter) -> _Reader:
    try:
        readers = [(kind, converter.get_structure_hook(kind)) for kind in kinds]
    except RecursionError:  # a class that contains itself: look when it is read
        readers = [(kind, converter.structure) for kind in kinds]

    def read(value: Any, cl: Any) -> Any:
        if type(value) is not list or len(value) != len(readers):
            raise _Misfit(f"a list of {len(readers)} items", value)
        items = []
        failures = []
        for index, (kind, read_item) in enumerate(readers):
            try:
                items.append(read_item(value[index], kind))
            except Exception as error:  # noqa: BLE001  gathered, as cattrs does for lists
                error.add_note(IterableValidationNote(f"index {index}", index, kind))
                failures.append(error)
        if failures:
            raise IterableValidationError(f"while reading {cl!r}", failures, cl)
        return tuple(items)

    return read


def _flag_reader(_cl: Any) -> _Reader:
    return _read_int


def _choice_reader(cl: Any) -> _Reader:
    return _choices_reader(_choices(cl))


def _choices_reader(choices: list[tuple[Any, Any]]) -> _Reader:
    expected = f"one of {show([plain for plain, _ in choices])[1:-1]}"

    def read(value: Any, _cl: Any) -> Any:
        for plain, member in choices:
            if value == plain and type(value) is type(plain):  # 1 is no True
                return member
        raise _Misfit(expected, value)

    return read


def _choices(cl: Any) -> list[tuple[Any, Any]]:
    """Return how each member of an Enum or Literal is written, and the member."""
    members = get_args(cl) if get_origin(cl) is Literal else cl
    try:
        return [(_checked(member, str(member), DEFAULT_LIMITS), member) for member in members]
    except Unstorable as error:
        raise _Unreadable(f"{_type_name(cl)} has a member that JSON cannot hold: {error}") from error


def _union_reader(cl: Any, converter: Converter) -> _Reader:
    """Return what reads a union by the JSON type it finds; refuse a union whose members JSON cannot tell apart."""
    if Any in get_args(cl):
        return lambda value, _cl: value
    claims: dict[type, list[Any]] = {}
    for member in get_args(cl):
        for json_type in _json_types(member):
            claims.setdefault(json_type, []).append(member)
    readers = {json_type: _claimed_reader(cl, members, converter) for json_type, members in claims.items()}
    expected = " or ".join(_JSON_NAMES[json_type] for json_type in claims)

    def read(value: Any, _cl: Any) -> Any:
        try:
            member, read_member = readers[type(value)]
        except KeyError:
            raise _Misfit(expected, value) from None
        return read_member(value, member)

    return read


def _claimed_reader(cl: Any, members: list[Any], converter: Converter) -> tuple[Any, _Reader]:
    """Return what reads the members of a union that are written as one JSON type."""
    if set(members) == {int, float}:
        members = [int]
    if len(members) == 1:
        return members[0], converter.get_structure_hook(members[0])
    if all(map(_is_record, members)):
        return cl, _records_reader(members, converter)
    choices = list(chain.from_iterable(map(_choices, members))) if all(map(_is_choice, members)) else []
    if not choices or len({_dumps(plain) for plain, _ in choices}) < len(choices):
        names = " and ".join(map(_type_name, members))
        raise _Unreadable(
            f"JSON cannot tell {names} apart in {_type_name(cl)}; "
            "declare one of them, or wrap each in a class of its own"
        )
    return cl, _choices_reader(choices)


def _records_reader(records: list[Any], converter: Converter) -> _Reader:
    names = ", ".join(map(_type_name, records))
    try:
        pick = create_default_dis_func(converter, *records)
    except TypeError as error:
        raise _Unreadable(
            f"JSON cannot tell {names} apart: their fields are alike; "
            'give each a field such as `kind: Literal["..."] = "..."`'
        ) from error

    def read(value: Any, _cl: Any) -> Any:
        try:
            cl: Any = pick(value)
        except (KeyError, TypeError, ValueError):
            raise _Misfit(f"the fields of one of {names}", value) from None
        return converter.structure(value, cl)

    return read


# What a declared type is.

_UNIONS = (Union, UnionType)
_MAPPINGS = (dict, Mapping, MutableMapping)
_ARRAYS: dict[Any, Callable[[list[Any]], Any]] = {
    list: list,
    MutableSequence: list,
    tuple: tuple,
    Sequence: tuple,
    set: set,
    MutableSet: set,
    frozenset: frozenset,
    AbstractSet: frozenset,
}
_JSON_NAMES: dict[type, str] = {
    NoneType: "null",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}
_JSON_TYPES: dict[Any, tuple[type, ...]] = {
    NoneType: (NoneType,),
    bool: (bool,),
    int: (int,),
    **dict.fromkeys((float, timedelta), (int, float)),
    **dict.fromkeys((str, bytes, datetime, date, time, Decimal, UUID), (str,)),
    **dict.fromkeys(_ARRAYS, (list,)),
    **dict.fromkeys(_MAPPINGS, (dict,)),
}


def _json_types(cl: Any) -> Iterable[type]:
    """Return the types that values declared as `cl` have in JSON."""
    cl = _unwrapped(cl)
    origin = get_origin(cl) or cl
    if origin in _UNIONS:
        return dict.fromkeys(chain.from_iterable(map(_json_types, get_args(cl))))
    if _is_choice(cl):
        return dict.fromkeys(type(plain) for plain, _ in _choices(cl))
    if _is_record(cl):
        return (dict,)
    for base in getattr(origin, "__mro__", ()):
        if base in _JSON_TYPES:
            return _JSON_TYPES[base]
    return (int,) if _is_flag(cl) else _JSON_NAMES  # a type unknown here may be anything


def _unwrapped(cl: Any) -> Any:
    """Return what a NewType, an Annotated or a type alias stands for."""
    while True:
        if get_origin(cl) is Annotated:
            cl = get_args(cl)[0]
        elif hasattr(cl, "__supertype__"):
            cl = cl.__supertype__
        elif hasattr(cl, "__value__"):
            cl = cl.__value__
        else:
            return cl


def _is_union(cl: Any) -> bool:
    return get_origin(cl) in _UNIONS


def _is_mapping(cl: Any) -> bool:
    return (get_origin(cl) or cl) in _MAPPINGS


def _is_array(cl: Any) -> bool:
    return (get_origin(cl) or cl) in _ARRAYS


def _is_record(cl: Any) -> bool:
    origin = get_origin(cl) or cl
    return isinstance(origin, type) and _field_names(origin) is not None


def _is_typed_dict(cl: Any) -> bool:
    return hasattr(get_origin(cl) or cl, "__required_keys__")  # also the one of typing_extensions


def _is_flag(cl: Any) -> bool:
    return isinstance(cl, type) and issubclass(cl, Flag)


def _is_choice(cl: Any) -> bool:
    return get_origin(cl) is Literal or (isinstance(cl, type) and issubclass(cl, Enum) and not issubclass(cl, Flag))


_FACTORIES: tuple[tuple[Callable[[Any], bool], Callable[..., _Reader]], ...] = (
    (_is_union, _union_reader),
    (_is_choice, _choice_reader),
    (_is_flag, _flag_reader),
    (_is_array, _array_reader),
    (_is_mapping, _mapping_reader),
    (_is_typed_dict, _typed_dict_reader),
    (_is_record, _record_reader),
)


def _type_name(cl: Any) -> str:
    if not isinstance(cl, type) or get_args(cl):
        return str(cl)
    return cl.__qualname__ if cl.__module__ == "builtins" else f"{cl.__module__}.{cl.__qualname__}"


# What went wrong, in one line.


def _first_failure(error: Exception) -> str:
    failures = list(_failures(error, ()))
    keys, reason = failures[0]
    more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
    return " ".join(f"{_path('state', keys)}: {reason}{more}".split())


def _failures(error: Exception, keys: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Take cattrs' group of errors apart: where each is, and what it says."""
    if isinstance(error, ClassValidationError):
        fields, whole = error.group_exceptions()
        for cause in whole:  # first, since a misspelt key explains the field that is missing
            yield from _failures(cause, (*keys, *_validated_field(cause)))
        for cause, field in fields:
            if isinstance(cause, KeyError):
                yield (*keys, field.name), "missing, and it has no default"
            else:
                yield from _failures(cause, (*keys, field.name))
    elif isinstance(error, IterableValidationError):
        items, whole = error.group_exceptions()
        for cause in whole:
            yield from _failures(cause, keys)
        for cause, item in items:
            yield from _failures(cause, (*keys, item.index))
    elif isinstance(error, ForbiddenExtraKeysError):
        for name in sorted(error.extra_fields):
            yield (*keys, name), _unknown_field(name, error.cl)
    else:
        # attrs' validators put more than their message into the arguments.
        yield keys, error.args[0] if error.args and isinstance(error.args[0], str) else describe(error)


def _unknown_field(name: str, cl: Any) -> str:
    origin = get_origin(cl) or cl
    names = _field_names(origin) or tuple(origin.__annotations__)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"the fields are: {', '.join(names)}"
    return f"no such field; {hint}"


def _validated_field(error: Exception) -> tuple[str, ...]:
    """Return the field whose attrs validator raised this: validators are called with it, so their frames know."""
    trace = error.__traceback__
    while trace is not None:
        for value in trace.tb_frame.f_locals.values():
            if isinstance(value, attrs.Attribute):
                return (value.name,)
        trace = trace.tb_next
    return ()
