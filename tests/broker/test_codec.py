"""Round trips, refusals, zero copies and registered types of the wire codec."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from rolloutbus.broker import codec
from rolloutbus.broker.errors import ConfigError, DecodeError, EncodeError


def joined(value: object) -> bytes:
    return b"".join(codec.encode(value))


def there_and_back(value: object) -> Any:
    return codec.decode(joined(value))


def identical(a: object, b: object) -> bool:
    """Equal in type, order and bits, which == is not."""
    return repr(a) == repr(b) and type(a) is type(b)


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.binary(max_size=40)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
)
plain = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(scalars.filter(lambda key: key == key), inner, max_size=5)
    ),
    max_leaves=30,
)
dtypes = (
    hnp.boolean_dtypes()
    | hnp.integer_dtypes(endianness="?")
    | hnp.unsigned_integer_dtypes(endianness="?")
    | hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64))
    | hnp.complex_number_dtypes(endianness="?")
    | hnp.datetime64_dtypes(endianness="?")
    | hnp.timedelta64_dtypes(endianness="?")
)


@given(plain)
def test_everything_msgpack_knows_comes_back_as_it_was(value: Any) -> None:
    assert identical(there_and_back(value), value)


@given(hnp.arrays(dtypes, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9)), st.booleans())
def test_arrays_of_every_plain_dtype_come_back_bit_for_bit(array: Any, fortran: bool) -> None:
    sent = np.asfortranarray(array) if fortran else array
    got = there_and_back({"a": sent})["a"]
    assert got.dtype == sent.dtype
    assert got.shape == sent.shape
    assert got.tobytes() == sent.tobytes()
    assert got.flags.c_contiguous
    assert not got.flags.writeable


@given(hnp.arrays(dtypes, ()))
def test_numpy_scalars_come_back_as_numpy_scalars(array: Any) -> None:
    scalar = array[()]
    got = there_and_back([scalar])[0]
    assert type(got) is type(scalar)
    assert got.tobytes() == scalar.tobytes()


@pytest.mark.parametrize("value", [np.str_("grün"), np.str_(""), np.bytes_(b"a\x00"), np.float64(0.1), np.bool_(True)])
def test_scalars_that_are_also_python_values_stay_numpy_scalars(value: Any) -> None:
    got = there_and_back(value)
    assert type(got) is type(value)
    assert got == value


@pytest.mark.parametrize("dtype", [">i4", "<f8", "|u1", "<c16", "g", "<U3", "|S5", "<M8[25s]", "|b1"])
@pytest.mark.parametrize("count", [0, 3, 5000])
def test_small_and_large_arrays_take_the_same_way(dtype: str, count: int) -> None:
    array = np.arange(count).astype("S" if dtype == "|S5" else dtype).astype(dtype)
    got = there_and_back([1, array, 2])
    assert got[::2] == [1, 2]
    assert got[1].dtype == array.dtype
    assert got[1].tobytes() == array.tobytes()


class Colour(enum.IntEnum):
    RED = 3


class Tag(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "something else"


class Point(NamedTuple):
    x: int
    y: int


@pytest.mark.parametrize(
    ("value", "base"),
    [
        (collections.OrderedDict([("b", 1), ("a", 2)]), {"b": 1, "a": 2}),
        (collections.defaultdict(list, {"k": [1]}), {"k": [1]}),
        (Colour.RED, 3),
        (Tag("tag"), "tag"),
        (Point(1, 2), [1, 2]),
        ((1, (2, [3])), [1, [2, [3]]]),
        (bytearray(b"ab"), b"ab"),
        (memoryview(b"ab"), b"ab"),
        (True, True),
        ({1: "int", "1": "str", b"1": "bytes"}, {1: "int", "1": "str", b"1": "bytes"}),
    ],
)
def test_subclasses_travel_as_exactly_their_base(value: object, base: object) -> None:
    assert identical(there_and_back(value), base)


def test_a_timestamp_of_msgpack_comes_back() -> None:
    timestamp: Any = cast(Any, msgpack).Timestamp(5, 7)
    assert there_and_back(timestamp) == timestamp


@dataclass
class Unknown:
    a: int


class Plain:
    pass


REFUSALS: list[tuple[object, str]] = [
    (
        {"responses_create_params": {"tools": [{}, {}, {"schema": {1}}]}},
        "row 17: responses_create_params.tools[2].schema is a set, which msgpack cannot carry; convert it to a list",
    ),
    ({1, 2}, "row 17 is a set, which msgpack cannot carry; convert it to a list"),
    ([decimal.Decimal(1)], "row 17: [0] is a Decimal, which msgpack cannot carry; convert it to a str or a float"),
    (
        {"when": datetime.datetime(2026, 1, 1)},
        "row 17: when is a datetime, which msgpack cannot carry; convert it to a str with isoformat()",
    ),
    ({"n": 2**64}, "row 17: n is an int of 65 bits, and msgpack carries 64; convert it to a str or a float"),
    ({"n": -(2**63) - 1}, "row 17: n is an int of 64 bits, and msgpack carries 64; convert it to a str or a float"),
    ({"d": Unknown(1)}, "row 17: d is an Unknown, which msgpack cannot carry; convert it with dataclasses.asdict"),
    (
        {"two words": [Plain()]},
        "row 17: ['two words'][0] is a Plain, which msgpack cannot carry; "
        "convert it to plain data, or register its type with codec.register",
    ),
    (
        {"t": "ab\ud800"},
        "row 17: t is a str with a lone surrogate at position 2, which UTF-8 cannot carry; "
        "clean it, for example with text.encode('utf-8', 'replace').decode()",
    ),
    (
        {"a": {(1, 2): 3}},
        "row 17: a has the key (1, 2), a tuple, which comes back as a list and cannot be a key; use a str",
    ),
    (
        {"a": {frozenset(): 3}},
        "row 17: a has the key frozenset(), which is a frozenset, which msgpack cannot carry; convert it to a list",
    ),
    (
        {"a": np.array([None])},
        "row 17: a has the numpy dtype object, which cannot be carried as raw bytes; "
        "convert it to a list, to a plain dtype, or send its fields as arrays of their own",
    ),
    (
        {"a": np.zeros(3, [("x", "i4"), ("o", "O")])},
        "row 17: a has the numpy dtype [('x', '<i4'), ('o', 'O')], which cannot be carried as raw bytes; "
        "convert it to a list, to a plain dtype, or send its fields as arrays of their own",
    ),
]


@pytest.mark.parametrize(("value", "message"), REFUSALS, ids=[message[7:40] for _, message in REFUSALS])
def test_a_refusal_names_the_row_the_path_and_the_remedy(value: object, message: str) -> None:
    with pytest.raises(EncodeError) as caught:
        codec.encode(value, where="row 17")
    assert str(caught.value) == message
    assert caught.value.__cause__ is None


def test_a_masked_array_is_refused_rather_than_losing_its_mask() -> None:
    with pytest.raises(EncodeError, match="value is a MaskedArray, which msgpack cannot carry"):
        codec.encode(np.ma.masked_array([1, 2], mask=[True, False]))


def test_a_cycle_is_named() -> None:
    value: dict[str, Any] = {"a": {}}
    value["a"]["back"] = value
    with pytest.raises(EncodeError, match=r"^value: a\.back contains itself, and a cycle cannot go on the wire"):
        codec.encode(value)


def nested(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


def test_nesting_too_deep_is_refused_and_the_deepest_allowed_comes_back() -> None:
    with pytest.raises(EncodeError, match="nested more than 1024 levels deep"):
        codec.encode(nested(1025))
    value = there_and_back(nested(500))
    for _ in range(500):
        (value,) = value
    assert value == 0


def test_an_encoder_is_sound_again_after_a_refusal() -> None:
    for _ in range(20):
        with pytest.raises(EncodeError):
            codec.encode([np.zeros(5000), {1}])
    assert joined([1]) == b"\x93\xce\x00\x00\x00\x02\x91\x01\xc6\x00\x00\x00\x00"


def test_the_payload_is_one_msgpack_document() -> None:
    length, doc, tail = cast(Any, msgpack).unpackb(joined({"a": np.zeros(1000), "b": 1}))
    assert doc["b"] == 1
    assert length > 0
    assert len(tail) >= 8000
    assert cast(Any, msgpack).unpackb(joined({"a": 1})) == [4, {"a": 1}, b""]


def test_array_bytes_are_neither_joined_on_the_way_out_nor_copied_on_the_way_in() -> None:
    first, second = np.arange(3001, dtype="u1"), np.arange(100_000.0)
    buffers = codec.encode({"first": first, "second": second})
    views = [cast("Any", np).frombuffer(buffer, "u1") for buffer in buffers if isinstance(buffer, memoryview)]
    assert [np.shares_memory(view, array) for view, array in zip(views, (first, second), strict=True)] == [True, True]
    payload = b"".join(buffers)
    assert codec.size_of(buffers) == len(payload)
    got = codec.decode(payload)
    whole = cast("Any", np).frombuffer(payload, "u1")
    for array in got.values():
        assert np.shares_memory(array, whole)
        offset = array.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
        assert offset % 16 == 0


def test_buffers_are_of_bytes_whatever_stands_in_the_arrays() -> None:
    """Whoever writes them takes their length for their size."""
    arrays = [
        np.zeros((50, 60), dtype=np.float64),
        np.zeros((50, 60, 3), dtype=np.float16).transpose(),
        np.zeros(3000, dtype=">i4"),
        np.zeros(3000, dtype="M8[ns]"),
        np.zeros(3000, dtype="U7"),
        np.zeros((2000, 1), dtype=bool)[::-1],
    ]
    views = [buffer for buffer in codec.encode(arrays) if isinstance(buffer, memoryview)]
    assert [(view.format, view.ndim, len(view)) for view in views] == [("B", 1, array.nbytes) for array in arrays]


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_every_kind_of_payload_decodes_to_read_only_arrays(wrap: Any) -> None:
    got = codec.decode(wrap(joined([np.arange(1000), np.arange(3)])))
    assert [array.flags.writeable for array in got] == [False, False]
    assert got[0].sum() == 499_500


def test_writable_arrays_are_copies() -> None:
    payload = joined([np.arange(1000), np.arange(3), np.zeros(0)])
    got = codec.decode(payload, writable=True)
    for array in got:
        array[:] = 7
    assert codec.decode(payload)[0][1] == 1


class Celsius:
    def __init__(self, degrees: Any) -> None:
        self.degrees = degrees


class Parent:
    def __init__(self, child: object) -> None:
        self.child = child


codec.register(Celsius, lambda value: {"degrees": value.degrees}, lambda plain: Celsius(**plain))
codec.register(Parent, lambda value: value.child, Parent, name="parent")


def test_a_registered_type_comes_back_with_arrays_inside() -> None:
    got = there_and_back([np.zeros(999), Celsius(np.arange(5000)), np.ones(999)])
    assert isinstance(got[1], Celsius)
    assert got[1].degrees.sum() == 12_497_500
    assert (got[0].sum(), got[2].sum()) == (0, 999)


def test_a_registered_type_may_hold_another_but_not_without_end() -> None:
    assert there_and_back(Parent(Parent(Celsius(3)))).child.child.degrees == 3
    deep: Any = 1
    for _ in range(9):
        deep = Parent(deep)
    with pytest.raises(EncodeError, match="value: a is a registered parent inside 8 others; nest them less deeply"):
        codec.encode({"a": deep})


def test_what_a_registered_type_packs_to_is_explained_too() -> None:
    with pytest.raises(
        EncodeError,
        match=r"^value: \[0\] is a registered parent whose packed value: \[1\] is a set, which msgpack cannot carry",
    ):
        codec.encode([Parent([0, {1}])])


def test_failing_pack_and_unpack_functions_are_named() -> None:
    class Broken:
        pass

    codec.register(Broken, lambda _: 1 // 0, lambda _: Broken(), name="broken")
    with pytest.raises(EncodeError, match="registered broken whose pack function raised ZeroDivisionError"):
        codec.encode(Broken())
    codec.register(Broken, lambda _: "", lambda plain: {"": Broken()}[plain + "?"], name="broken")
    with pytest.raises(DecodeError, match="holds a broken, whose unpack function raised KeyError"):
        there_and_back(Broken())


def test_a_name_nobody_registered_is_named() -> None:
    payload = joined(Celsius(1)).replace(b"Celsius", b"Kelvins")
    with pytest.raises(DecodeError, match=r"Kelvins', which nothing in this process has registered; import"):
        codec.decode(payload)


def test_registering_what_is_known_or_taken_is_refused() -> None:
    with pytest.raises(ConfigError, match="dict cannot be registered"):
        codec.register(dict, dict, dict)
    with pytest.raises(ConfigError, match=r"'parent' is registered for .*Parent already"):
        codec.register(Plain, lambda _: 1, lambda _: Plain(), name="parent")


def test_a_missing_numpy_is_a_clear_decode_error(monkeypatch: pytest.MonkeyPatch) -> None:
    payloads = [joined(np.zeros(3)), joined(np.zeros(3000)), joined(np.float32(1))]
    monkeypatch.setitem(sys.modules, "numpy", None)
    for payload in payloads:
        with pytest.raises(DecodeError, match="holds a numpy array, and numpy is not installed here; install numpy"):
            codec.decode(payload)


def test_encoding_imports_neither_numpy_nor_torch() -> None:
    program = (
        "import sys; from rolloutbus.broker import codec; codec.decode(b''.join(codec.encode({'a': (1, {})})));"
        "print(sorted({'numpy', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_threads_do_not_mix_their_payloads() -> None:
    def round_trip(number: int) -> bool:
        value = {"n": [number] * 300, "a": np.full(500, number), "t": (number, Parent(number))}
        got = there_and_back(value)
        return got["n"] == value["n"] and (got["a"] == number).all() and got["t"][1].child == number

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(round_trip, range(400)))


def test_nan_bits_survive() -> None:
    assert math.isnan(there_and_back(float("nan")))
    assert math.copysign(1, there_and_back(-0.0)) == -1
