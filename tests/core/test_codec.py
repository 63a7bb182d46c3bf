import json
import math
import sys
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag, IntEnum, StrEnum
from types import MappingProxyType, ModuleType
from typing import Annotated, Any, Generic, Literal, NewType, NotRequired, Required, TypedDict, TypeVar
from uuid import UUID

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gendurable.core.codec import StateCodec, decode_value, encode_object, encode_value
from gendurable.core.limits import Limits
from gendurable.errors import DefinitionError, InvalidState, UndecodableRow, Unstorable


class Color(Enum):
    RED = "red"
    ONE = 1


class Size(StrEnum):
    BIG = "big"


class Level(IntEnum):
    LOW = 1


class Access(Flag):
    READ = 1
    WRITE = 2


class Text(str):
    __slots__ = ()


class Number(int):
    pass


@attrs.frozen
class Line:
    sku: str
    price: int
    count: int = attrs.field(default=1, validator=attrs.validators.ge(0))


@dataclass
class Address:
    street: str
    notes: list[str] = field(default_factory=list)
    shouted: str = field(init=False, default="")

    def __post_init__(self):
        if not self.street:
            raise ValueError("an address\nneeds a street")
        self.shouted = self.street.upper()


# Values.


def nested(depth):
    value = []
    for _ in range(depth - 1):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (1.0, "1.0"),
        ("é\n\u2028", '"é\\n\u2028"'),
        ({"a": [1, {"b c": None}]}, '{"a":[1,{"b c":null}]}'),
        ((1, 2), "[1,2]"),
        ({3, 1, 2}, "[1,2,3]"),
        (frozenset({Color.RED, "blue"}), '["blue","red"]'),
        ({"x", 1}, '["x",1]'),
        (Text("t"), '"t"'),
        (Number(7), "7"),
        ({Text("k"): {Size.BIG: 1}}, '{"k":{"big":1}}'),
        ([Color.RED, Color.ONE, Size.BIG, Level.LOW, Access.READ | Access.WRITE], '["red",1,"big",1,3]'),
        (datetime(2024, 1, 2, 3, 4, 5, 6, UTC), '"2024-01-02T03:04:05.000006+00:00"'),
        (date(2024, 1, 2), '"2024-01-02"'),
        (time(3, 4), '"03:04:00"'),
        (timedelta(minutes=1, microseconds=1), "60.000001"),
        (Decimal("1.50"), '"1.50"'),
        (UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
        (b"\0\xff", '"AP8="'),
        (Line("a", 2), '{"sku":"a","price":2,"count":1}'),
        (Address("high"), '{"street":"high","notes":[]}'),
        (OrderedDict(a=MappingProxyType({"b": 1})), '{"a":{"b":1}}'),
        (2**1024 - 1, str(2**1024 - 1)),
        (sys.float_info.max, "1.7976931348623157e+308"),
    ],
)
def test_a_value_is_written_as(value, text):
    assert encode_value(value, what="result") == text


def test_two_hundred_levels_may_be_nested():
    assert encode_value(nested(200), what="result") == "[" * 200 + "]" * 200


cyclic: dict[str, Any] = {}
cyclic["me"] = cyclic


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (object(), "result: a value of type object cannot be stored"),
        ({"items": [0, 1, 2, {"price": 1j}]}, "result.items[3].price: a value of type complex"),
        ({"a b": {"1": Line}}, 'result["a b"]["1"]: a value of type type'),
        ({"x": Line("a", math.nan)}, "result.x.price: nan is no JSON number"),
        ((Address("s", [math.inf]),), "result[0].notes[0]: inf is no JSON number"),
        ({"a": {3: 1}}, "result.a[3]: the key is of type int"),
        ({None: 1}, "result[None]: the key is of type NoneType"),
        ({"a": "x\0y"}, "result.a: a NUL character"),
        ({"a\0": 1}, 'result["a\\u0000"]: a NUL character'),
        ({"a": "\ud800"}, "result.a: a lone surrogate"),
        ({"é \ud800": 1}, 'result["\\u00e9 \\ud800"]: a lone surrogate'),
        ({"größe cm": math.nan}, 'result["größe cm"]: nan'),
        ({"n": 2**1024}, "result.n: an integer of 1025 bits, the limit is 1024"),
        ({"n": -(2**1024)}, "result.n: an integer of 1025 bits"),
        ({"n": 10**10_000}, "result.n: an integer of"),
        (nested(201), "result[0][0][0]"),
        (nested(100_000), "nested too deeply"),
        (cyclic, "result.me.me.me"),
        (cyclic, "nested too deeply, or containing itself; flatten it"),
        ("é" * 2**19, "result: 1048578 bytes of JSON, the limit is 1048576"),
    ],
)
def test_a_value_that_cannot_be_stored_is_refused_with_its_path(value, complaint):
    with pytest.raises(Unstorable) as caught:
        encode_value(value, what="result")
    assert complaint in str(caught.value)
    assert len(str(caught.value)) < 300


def test_limits_can_be_narrowed():
    with pytest.raises(Unstorable, match="the limit is 3"):
        encode_value("abc", what="result", limits=Limits(json_bytes=3))
    with pytest.raises(Unstorable, match=r"result\[0\]: nested too deeply"):
        encode_value([[]], what="result", limits=Limits(json_depth=1))


def test_a_nearly_full_stack_is_no_crash():
    def descend(depth):
        return descend(depth - 1) if depth else encode_value(nested(200), what="result")

    with pytest.raises(Unstorable, match="nested too deeply"):
        for depth in range(sys.getrecursionlimit() - 300, sys.getrecursionlimit(), 20):
            descend(depth)


@pytest.mark.parametrize("value", [{}, {"a": 1}, Line("a", 1), Address("s")])
def test_an_object_is_a_mapping_or_an_instance(value):
    assert encode_object(value, what="result").startswith("{")


@pytest.mark.parametrize("value", [None, [], "text", 1, Color.RED, Line])
def test_anything_else_is_no_object(value):
    with pytest.raises(Unstorable, match=r"^result: "):
        encode_object(value, what="result")


@pytest.mark.parametrize(
    "text", ["", "{", "nul", "NaN", "[-Infinity]", "9" * 5000, "[" * 100_000, '"\ud800', "{'a':1}"]
)
def test_stored_text_that_cannot_be_read_is_an_undecodable_row(text):
    with pytest.raises(UndecodableRow, match=r"^payload: the stored JSON cannot be read: "):
        decode_value(text, what="payload")


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**1024) + 1, 2**1024 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", exclude_characters="\0")),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8", exclude_characters="\0")), inner)
    ),
    max_leaves=20,
)


@given(json_values)
def test_any_json_value_comes_back_as_it_was(value):
    text = encode_value(value, what="result")
    assert decode_value(text, what="result") == value
    assert json.loads(text) == value


# States.


Fast = Literal["fast"]
Slow = Literal["slow"]
UserId = NewType("UserId", int)
T = TypeVar("T")


@attrs.define
class Box(Generic[T]):
    item: T


@attrs.define
class Card:
    number: str


@attrs.define
class Cash:
    amount: int


@attrs.frozen
class Opened:
    at: int
    kind: Literal["opened"] = "opened"


@attrs.frozen
class Closed:
    at: int
    kind: Literal["closed"] = "closed"


class Options(TypedDict, total=False):
    depth: Required[int]
    color: Color
    line: Line


@attrs.define
class Node:
    value: int
    children: "list[Node]" = attrs.field(factory=list)
    next: "Node | None" = None
    named: "dict[str, Node]" = attrs.field(factory=dict)
    pair: "tuple[int, Node] | None" = None


@attrs.frozen
class Checked:
    number: int = attrs.field(default=0)
    name: str = attrs.field(default="", converter=str.strip)
    code: str = attrs.field(default="a", validator=attrs.validators.matches_re("[a-z]"))

    @number.validator
    def _even(self, attribute, value):
        if value % 2:
            raise ValueError("an odd\nnumber")


@attrs.frozen
class Order:
    number: int
    paid: int = 0
    lines: list[Line] = attrs.field(factory=list)


FIELDS = [
    (int, 3, 3),
    (int, Number(3), 3),
    (float, 1.5, 1.5),
    (float, 10**16, 10**16),
    (str, "x", "x"),
    (bool, True, True),
    (Any, {"a": [1]}, {"a": [1]}),
    (list[int], [1, 2], [1, 2]),
    (list, [1, "a"], [1, "a"]),
    (tuple[int, str], (1, "a"), [1, "a"]),
    (tuple[int, ...], (1, 2, 3), [1, 2, 3]),
    (set[int], {2, 1}, [1, 2]),
    (frozenset[str], frozenset("ba"), ["a", "b"]),
    (dict[str, Decimal], {"a b": Decimal("1.0")}, {"a b": "1.0"}),
    (Mapping[str, int], {"a": 1}, {"a": 1}),
    (dict[Size, int], {Size.BIG: 1}, {"big": 1}),
    (datetime, datetime(2024, 1, 2, tzinfo=timezone(timedelta(hours=2))), "2024-01-02T00:00:00+02:00"),
    (datetime, datetime(2024, 1, 2, 3, 4, 5, 6), "2024-01-02T03:04:05.000006"),  # noqa: DTZ001  naive on purpose
    (date, date(2024, 1, 2), "2024-01-02"),
    (time, time(1, 2, 3), "01:02:03"),
    (timedelta, timedelta(days=-1, microseconds=1), -86399.999999),
    (Decimal, Decimal("1.50"), "1.50"),
    (UUID, UUID(int=7), str(UUID(int=7))),
    (bytes, b"\0\xff", "AP8="),
    (Color, Color.ONE, 1),
    (Size, Size.BIG, "big"),
    (Level, Level.LOW, 1),
    (Access, Access.READ | Access.WRITE, 3),
    (Literal["a", 1, True], True, True),
    (Literal[Color.RED, "x"], Color.RED, "red"),
    (Fast | Slow, "slow", "slow"),
    (UserId, UserId(5), 5),
    (Annotated[int, "metadata"], 5, 5),
    (Box[int], Box(1), {"item": 1}),
    (Line, Line("a", 1), {"sku": "a", "price": 1, "count": 1}),
    (Address, Address("s"), {"street": "s", "notes": []}),
    (Options, {"depth": 1, "color": Color.RED}, {"depth": 1, "color": "red"}),
    (Line | None, None, None),
    (datetime | None, datetime(2024, 1, 2, tzinfo=UTC), "2024-01-02T00:00:00+00:00"),
    (int | float | str | bool | None, 1.5, 1.5),
    (int | float | str | bool | None, 1, 1),
    (int | float | str | bool | None, False, False),
    (int | Decimal | list[int], Decimal(1), "1"),
    (Card | Cash, Cash(1), {"amount": 1}),
    (list[Card | Cash | None], [Card("1"), None], [{"number": "1"}, None]),
    (Opened | Closed, Closed(1), {"at": 1, "kind": "closed"}),
    (Node, Node(1, [Node(2)], Node(3), {"a": Node(4)}, (5, Node(6))), ...),
]


@pytest.mark.parametrize(("kind", "value", "stored"), FIELDS)
@pytest.mark.parametrize("make", [attrs.make_class, TypedDict], ids=["attrs", "typed_dict"])
def test_a_field_comes_back_as_it_was(make, kind, value, stored):
    if make is TypedDict:
        state_class = TypedDict("State", {"it": kind})  # noqa: UP013  made for each case
        state = {"it": value}
    else:
        state_class = attrs.make_class("State", {"it": attrs.field(type=kind)})
        state = state_class(value)
    codec = StateCodec(state_class)
    text = codec.encode(state)
    assert stored is ... or json.loads(text) == {"it": stored}
    assert codec.decode(text) == state
    assert codec.parse(state) == codec.parse({"it": value}) == codec.parse(json.loads(text))
    if type(value) is not Number and kind is not float:
        back = codec.decode(text)
        assert type(back["it"] if make is TypedDict else back.it) is type(value)


@pytest.mark.parametrize(
    ("kind", "value", "complaint"),
    [
        (int, True, "expected an integer, got True"),
        (int, "1", "expected an integer, got '1'"),
        (int, 1.0, "expected an integer, got 1.0"),
        (int, None, "expected an integer, got None"),
        (float, True, "expected a number, got True"),
        (float, "1", "expected a number, got '1'"),
        (float, -(2**1024) + 1, "expected a number that a float can hold"),
        (str, 1, "expected a string, got 1"),
        (bool, 1, "expected true or false, got 1"),
        (list[int], "12", "expected a list, got '12'"),
        (list[int], {"a": 1}, "expected a list, got {'a': 1}"),
        (list, "12", "expected a list"),
        (set[str], "ab", "expected a list"),
        (tuple[int, str], [1], "expected a list of 2 items, got [1]"),
        (tuple[int, str], {"a": 1}, "expected a list of 2 items, got {'a': 1}"),
        (dict[str, int], [], "expected an object, got []"),
        (dict, [], "expected an object"),
        (datetime, "yesterday", "expected an ISO date and time, got 'yesterday'"),
        (datetime, 7, "expected an ISO date and time"),
        (date, datetime(2024, 1, 2, tzinfo=UTC), "expected an ISO date, got '2024-01-02T00:00:00+00:00'"),
        (timedelta, "1", "expected a number of seconds"),
        (timedelta, 1e300, "expected a number of seconds that a timedelta can hold"),
        (Decimal, "one", "expected a decimal number as text, got 'one'"),
        (Decimal, 1.5, "expected a decimal number as text"),
        (UUID, "x", "expected a UUID as text"),
        (bytes, "%", "expected base64 text"),
        (Color, "blue", "expected one of 'red', 1, got 'blue'"),
        (Color, True, "expected one of 'red', 1, got True"),
        (Size, "small", "'small' is not a valid Size"),
        (Level, True, "expected an integer"),
        (Access, 1.0, "expected an integer"),
        (Literal[1, "a"], True, "expected one of 1, 'a', got True"),
        (UserId, "1", "expected an integer"),
        (int | None, "1", "expected an integer or null, got '1'"),
        (Card | Cash, {"x": 1}, "expected the fields of one of"),
        (Opened | Closed, {"at": 1, "kind": ["x"]}, "expected the fields of one of"),
        (Line, "sku", "expected an object, got 'sku'"),
    ],
)
def test_a_field_of_the_wrong_type_is_refused(kind, value, complaint):
    codec = StateCodec(attrs.make_class("State", {"it": attrs.field(type=kind)}))
    with pytest.raises(InvalidState) as caught:
        codec.parse({"it": value})
    assert str(caught.value).startswith(f"state.it: {complaint}")
    with pytest.raises(InvalidState, match=r"^state\.it: "):
        codec.decode(encode_value({"it": value}, what="state"))


@pytest.mark.parametrize(
    ("state_class", "value", "complaint"),
    [
        (Order, {}, "state.number: missing, and it has no default"),
        (Order, None, "state.number: missing, and it has no default"),
        (Order, {"number": 1, "piad": 2}, "state.piad: no such field; did you mean 'paid'?"),
        (Order, {"number": 1, "zzz": 2}, "state.zzz: no such field; the fields are: number, paid, lines"),
        (Order, {"nubmer": 1}, "state.nubmer: no such field; did you mean 'number'? (and 1 more)"),
        (Order, {"number": "x", "paid": "y", "lines": 0}, "state.number: expected an integer, got 'x' (and 2 more)"),
        (
            Order,
            {"number": 1, "lines": [{"sku": "a", "price": 1}, {"sku": "b", "price": "abc"}]},
            "state.lines[1].price: expected an integer, got 'abc'",
        ),
        (
            Node,
            {"value": 1, "pair": ["x", {"value": "y"}]},
            "state.pair[0]: expected an integer, got 'x' (and 1 more)",
        ),
        (Node, {"value": 1, "pair": [1, {"value": "y"}]}, "state.pair[1].value: expected an integer, got 'y'"),
        (
            Order,
            {"number": 1, "lines": [Line("a", 1), Line("b", None)]},
            "state.lines[1].price: expected an integer, got None",
        ),
        (Order, Order("42"), "state.number: expected an integer, got '42'"),
        (Order, Order(42, lines=[Line("a", 1), Line("a", "b")]), "state.lines[1].price: expected an integer, got 'b'"),
        (
            Order,
            {"number": 1, "lines": [{"sku": "a", "price": 1, "count": -1}]},
            "state.lines[0].count: 'count' must be >= 0: -1",
        ),
        (Checked, {"number": 1}, "state.number: an odd number"),
        (Checked, {"code": "Z"}, "state.code: 'code' must match regex"),
        (Address, {"street": ""}, "state: an address needs a street"),
        (Options, {}, "state.depth: missing, and it has no default"),
        (Options, {"depth": 1, "colour": "red"}, "state.colour: no such field; did you mean 'color'?"),
        (Options, {"depth": 1, "line": {"sku": 1, "price": 1}}, "state.line.sku: expected a string, got 1"),
        (dict[str, int], {"a b": "x"}, "state[\"a b\"]: expected an integer, got 'x'"),
        (
            Node,
            {"value": 1, "children": [{"value": 2, "next": {"value": "x"}}]},
            "state.children[0].next.value: expected",
        ),
        (Node, {"value": 1, "named": {"a": {"value": None}}}, "state.named.a.value: expected"),
        (Order, [], "state: expected test_codec.Order or a mapping, got []"),
        (Order, Line("a", 1), "state: expected test_codec.Order or a mapping, got Line("),
        (dict, Line("a", 1), "state: expected dict or a mapping, got Line("),
    ],
)
def test_a_state_that_does_not_fit_is_refused_in_one_line_with_the_path(state_class, value, complaint):
    with pytest.raises(InvalidState) as caught:
        StateCodec(state_class).parse(value)
    assert str(caught.value).startswith(complaint)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("state_class", "value", "text"),
    [
        (Order, {"number": 1}, '{"number":1,"paid":0,"lines":[]}'),
        (Order, Order(1), '{"number":1,"paid":0,"lines":[]}'),
        (
            Order,
            {"number": 1, "lines": (Line("a", 1),)},
            '{"number":1,"paid":0,"lines":[{"sku":"a","price":1,"count":1}]}',
        ),
        (Checked, None, '{"number":0,"name":"","code":"a"}'),
        (Checked, {"name": " x "}, '{"number":0,"name":"x","code":"a"}'),
        (Address, {"street": "s"}, '{"street":"s","notes":[]}'),
        (Options, {"depth": 1}, '{"depth":1}'),
        (dict, None, "{}"),
        (dict, {"a": {2, 1}, "b": Decimal(1)}, '{"a":[1,2],"b":"1"}'),
        (Mapping, MappingProxyType({"a": 1}), '{"a":1}'),
        (dict[str, date], {"a": date(2024, 1, 2)}, '{"a":"2024-01-02"}'),
        (Box[int], Box(1), '{"item":1}'),
        (Card | Cash, Cash(1), '{"amount":1}'),
    ],
)
def test_parsing_returns_the_normal_form(state_class, value, text):
    codec = StateCodec(state_class)
    assert codec.parse(value) == text
    assert codec.encode(codec.decode(text)) == text


@pytest.mark.parametrize(
    ("state_class", "text", "state"),
    [
        (Order, '{"number":1,"gone":2}', Order(1)),
        (Address, '{"street":"s","notes":["n"],"gone":[]}', Address("s", ["n"])),
        (Options, '{"depth":1,"gone":2}', {"depth": 1}),
        (dict, '{"any":[1,null]}', {"any": [1, None]}),
    ],
)
def test_a_stored_state_may_have_unknown_keys_and_lack_fields_with_defaults(state_class, text, state):
    assert StateCodec(state_class).decode(text) == state


@pytest.mark.parametrize("state_class", [Order, Options, dict, dict[str, int]])
@pytest.mark.parametrize("text", ["[]", "null", '"{}"'])
def test_a_stored_state_that_is_no_object_is_invalid(state_class, text):
    with pytest.raises(InvalidState, match=r"^state: expected an object, got "):
        StateCodec(state_class).decode(text)


def test_a_stored_state_that_is_no_json_is_an_undecodable_row():
    with pytest.raises(UndecodableRow, match=r"^state: "):
        StateCodec(Order).decode("{")


@pytest.mark.parametrize("state", [{"number": 1}, None, Line("a", 1), Order])
def test_only_an_instance_of_the_state_class_is_encoded(state):
    with pytest.raises(InvalidState, match=r"^state: expected test_codec\.Order, got "):
        StateCodec(Order).encode(state)


@pytest.mark.parametrize("state_class", [dict, Options, Mapping])
def test_only_a_mapping_is_encoded_where_states_are_mappings(state_class):
    with pytest.raises(InvalidState, match=r"^state: expected "):
        StateCodec(state_class).encode([("depth", 1)])


@pytest.mark.parametrize(("method", "kind"), [("encode", Unstorable), ("parse", InvalidState)])
def test_an_unstorable_state_is_refused_with_the_path(method, kind):
    with pytest.raises(kind, match=r"^state\.lines\[0\]\.sku: a NUL"):
        getattr(StateCodec(Order), method)(Order(1, lines=[Line("\0", 1)]))
    with pytest.raises(kind, match=r"^state\.a\.b: nan"):
        getattr(StateCodec(dict), method)({"a": {"b": math.nan}})


def test_a_state_as_deep_as_the_limit_comes_back():
    node = Node(0)
    for _ in range(198):
        node = Node(0, next=node)
    codec = StateCodec(Node)
    assert codec.encode(codec.decode(codec.encode(node))) == codec.encode(node)


class Odd(Enum):
    ITEM = object()


@attrs.define
class Left:
    size: int = 1


@attrs.define
class Right:
    size: int = 2


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        (str | datetime, "JSON cannot tell str and datetime.datetime apart"),
        (bytes | Decimal | None, "JSON cannot tell bytes and decimal.Decimal apart"),
        (list[int] | set[int], r"JSON cannot tell list\[int\] and set\[int\] apart"),
        (float | timedelta, "JSON cannot tell float and datetime.timedelta apart"),
        (int | Access, "JSON cannot tell int and test_codec.Access apart"),
        (Color | Literal["red"], "JSON cannot tell"),
        (Color | str, "JSON cannot tell"),
        (list[str | UserId | Level], "JSON cannot tell"),
        (Line | dict[str, int], "JSON cannot tell"),
        (Left | Right, "JSON cannot tell test_codec.Left, test_codec.Right apart: their fields are alike"),
        (Odd, "test_codec.Odd has a member that JSON cannot hold"),
        (object, "object cannot be read back from JSON"),
        (complex, "complex cannot be read back from JSON"),
    ],
)
def test_a_class_whose_states_could_not_be_read_back_is_refused(kind, complaint):
    state_class = attrs.make_class("State", {"it": attrs.field(type=kind)})
    with pytest.raises(DefinitionError, match=rf"State: .*{complaint}"):
        StateCodec(state_class)


@pytest.mark.parametrize("state_class", [int, list[int], str, Order | int, object, None])
def test_a_state_class_must_make_json_objects(state_class):
    with pytest.raises(DefinitionError, match="cannot be a state class"):
        StateCodec(state_class)


POSTPONED = """
from __future__ import annotations
import attrs
from dataclasses import dataclass
from typing import NotRequired, Required, TypedDict

@attrs.frozen
class Attrs:
    later: Later
    maybe: Later | None = None

@dataclass
class Data:
    later: list[Later]

class Dict(TypedDict, total=False):
    later: Required[Later]
    maybe: Later

class Whole(TypedDict):
    later: Later
    maybe: NotRequired[Whole]
"""
LATER = """
@attrs.frozen
class Later:
    number: int
"""


@pytest.mark.parametrize("name", ["Attrs", "Data", "Dict", "Whole"])
def test_annotations_kept_as_text_are_resolved_when_their_names_exist(name, monkeypatch):
    module = ModuleType("postponed")
    monkeypatch.setitem(sys.modules, "postponed", module)
    exec(POSTPONED, module.__dict__)
    codec = StateCodec(getattr(module, name))
    with pytest.raises(DefinitionError, match="'Later' is not defined; define"):
        codec.parse({"later": {"number": 1}})
    exec(LATER, module.__dict__)
    later = {"number": 1}
    value = {"later": [later] if name == "Data" else later}
    assert json.loads(codec.parse(value)).items() >= value.items()
    with pytest.raises(InvalidState, match=r"^state\.later: missing"):
        codec.parse({})
    with pytest.raises(InvalidState, match=r"^state\.later.*number: expected an integer"):
        codec.decode(codec.parse(value).replace("1", '"x"'))


class Marked(TypedDict):
    needed: int
    optional: NotRequired[int]


def test_a_typed_dict_may_mark_single_keys():
    codec = StateCodec(Marked)
    assert codec.parse({"needed": 1}) == '{"needed":1}'
    with pytest.raises(InvalidState, match=r"^state\.needed: missing"):
        codec.parse({"optional": 1})


states = st.builds(
    Order,
    st.integers(-(2**63), 2**63),
    st.integers(-(2**63), 2**63),
    st.lists(
        st.builds(
            Line, st.text(st.characters(codec="utf-8", exclude_characters="\0")), st.integers(0), st.integers(0, 9)
        )
    ),
)


@given(states)
def test_any_state_comes_back_as_it_was(state):
    codec = StateCodec(Order)
    assert codec.decode(codec.encode(state)) == state
    assert codec.parse(state) == codec.encode(state)
