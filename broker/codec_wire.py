"""The payload's layout, and the two machines that write and read it.

A payload is one msgpack document: `[length of doc as uint32, doc, tail as bin32]`. Large arrays stand in the
tail, each at a multiple of 16 bytes from the payload's start, and the doc points at them with an extension type;
offsets count from the first such multiple inside the tail, so that they can be written before the doc's length is
known.

Promises: encoding copies no bytes of a contiguous array; decoding reads nothing outside the payload, allocates in
proportion to it, and raises nothing but DecodeError. A msgpack.ExtType or ormsgpack.Ext of the caller's own
must not be used: the packer takes it without asking, and decoding refuses its code or takes it for one of ours.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import msgpack
import ormsgpack

from .codec_arrays import (
    array_bytes,
    dtype_token,
    kind_of,
    make_array,
    make_scalar,
    make_tensor,
    scalar_parts,
    tensor_parts,
)
from .codec_refusals import Refused, TooNested, class_of, encode_error, why_unknown
from .errors import DecodeError, EncodeError

Buffer = bytes | memoryview
Payload = bytes | bytearray | memoryview

ARRAY, SCALAR, TENSOR, REGISTERED, SHARED = range(1, 6)
INLINE_BELOW = 1024
ALIGNMENT = 16
# Each level starts an unpacker of about 40 KB on the C stack, and a thread may have only 512 KB.
MAX_REGISTERED_DEPTH = 8
# A list is allocated when its header is read, so 1,024 nested headers cost at most 1,024 × 8 × this many bytes.
_TRUSTED_LIST_LENGTH = 16_384
_KEEP_ENCODERS = 4
_KEEP_BELOW = 1 << 22
_JOIN_BELOW = 1 << 14
_PADDING = bytes(ALIGNMENT)
_ONLY_INTS = frozenset((int,))
ENCODE_FAILURES = (Refused, ValueError, OverflowError, TypeError, RecursionError)
_DECODE_FAILURES = (
    ValueError,
    TypeError,
    OverflowError,
    RecursionError,
    MemoryError,
    msgpack.UnpackException,
)

HEAD = struct.Struct(">BBI")
_TAIL_HEAD = struct.Struct(">BI")
ExtType = msgpack.ExtType
_unpackb = cast("Callable[..., Any]", msgpack.unpackb)
_quick_packb, _quick_unpackb = ormsgpack.packb, ormsgpack.unpackb
# Whatever is not exactly a plain type goes to `default`, as with msgpack's strict types.
_PLAIN_ONLY = (
    ormsgpack.OPT_PASSTHROUGH_BIG_INT
    | ormsgpack.OPT_PASSTHROUGH_DATACLASS
    | ormsgpack.OPT_PASSTHROUGH_DATETIME
    | ormsgpack.OPT_PASSTHROUGH_ENUM
    | ormsgpack.OPT_PASSTHROUGH_SUBCLASS
    | ormsgpack.OPT_PASSTHROUGH_TUPLE
    | ormsgpack.OPT_PASSTHROUGH_UUID
)


class Registration(NamedTuple):
    """How one registered type travels."""

    cls: type
    name: str
    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]


by_type: dict[type, Registration] = {}
by_name: dict[str, Registration] = {}


class Encoder:
    """Packs values and collects the large leaves that stand in the tail; used by one thread at a time."""

    __slots__ = ("_depth", "_extension", "_packer", "saw_registered", "saw_tuple", "size", "views")

    def __init__(self) -> None:
        self._packer = _packer(default=self._extend, strict_types=True)
        # Each of the two packers knows only its own.
        self._extension: Callable[[int, bytes], Any] = ExtType
        self._depth = 0
        self.saw_tuple = False
        self.saw_registered = False
        self.reset_tail()

    def reset_tail(self) -> None:
        """Forgets the tail."""
        self.views: list[Buffer] = []
        self.size = 0

    def pack(self, value: object) -> bytes:
        """The msgpack document of `value`; raises Refused, or what msgpack raises.

        ormsgpack writes the same bytes, lists of numbers three times as fast. It knows no keys but texts and does not
        say what it refuses, so for all but the common case msgpack has the word.
        """
        mark = self.mark()
        self.saw_tuple = self.saw_registered = False
        self._extension = ormsgpack.Ext
        try:
            return _quick_packb(value, self._extend, _PLAIN_ONLY)
        except TypeError:
            self.back_to(mark)
        self.saw_tuple = self.saw_registered = False
        self._extension = ExtType
        doc: bytes = self._packer.pack(value)
        if self.saw_tuple:
            _refuse_list_keys(doc)
        return doc

    def mark(self) -> tuple[int, int]:
        """Where the tail ends now, for `back_to`."""
        return len(self.views), self.size

    def back_to(self, mark: tuple[int, int]) -> None:
        """Cuts the tail to what it was at `mark`."""
        del self.views[mark[0] :]
        self.size = mark[1]

    def append(self, raw: Buffer, size: int) -> int:
        """Puts `raw` into the tail and gives its offset there."""
        gap = -self.size % ALIGNMENT
        if gap:
            self.views.append(_PADDING[:gap])
        offset = self.size + gap
        self.views.append(raw)
        self.size = offset + size
        return offset

    def _extend(self, value: Any) -> Any:
        cls = class_of(value)
        handler = _handlers.get(cls) or _find_handler(cls)
        if handler is None:
            return _as_base(value)
        return handler(self, value)

    def pack_tuple(self, value: tuple[Any, ...]) -> list[Any]:
        """A tuple as a list."""
        self.saw_tuple = True
        return list(value)

    def pack_extension(self, value: Any) -> Any:
        """An extension that is one already."""
        return self._extension(value.code, value.data)

    def pack_array(self, array: Any) -> Any:
        """A numpy array as an extension."""
        token = dtype_token(array.dtype)
        return self._region(ARRAY, token, array.shape, array_bytes(array), array.nbytes)

    def pack_scalar(self, scalar: Any) -> Any:
        """A numpy scalar as an extension."""
        return self._extension(SCALAR, _quick_packb(scalar_parts(scalar)))

    def pack_tensor(self, tensor: Any) -> Any:
        """A torch tensor as an extension."""
        token, shape, raw = tensor_parts(tensor)
        view = memoryview(raw)
        return self._region(TENSOR, token, shape, view, view.nbytes)

    def _region(self, code: int, token: str, shape: tuple[int, ...], raw: memoryview, size: int) -> Any:
        if size < INLINE_BELOW:
            return self._extension(code, _quick_packb((token, shape, raw)))
        return self._extension(code, _quick_packb((token, shape, self.append(raw, size), size)))

    def pack_registered(self, value: Any) -> Any:
        """A registered type as an extension."""
        self.saw_registered = True
        entry = by_type[type(value)]
        if self._depth == MAX_REGISTERED_DEPTH:
            raise TooNested(f"is a registered {entry.name} inside {MAX_REGISTERED_DEPTH} others; nest them less deeply")
        try:
            plain = entry.pack(value)
        except Exception as error:
            raise Refused(f"is a registered {entry.name} whose pack function raised {error!r}; mend it") from error
        # msgpack's packer is not reentrant, so what stands inside is packed by another one onto the same tail.
        inner = borrow()
        inner.views, inner.size, inner._depth = self.views, self.size, self._depth + 1
        try:
            doc = inner.pack([entry.name, plain])
        except TooNested:
            raise
        except ENCODE_FAILURES as error:
            raise Refused(str(explain(plain, f"is a registered {entry.name} whose packed value", error))) from None
        self.size = inner.size
        inner._depth = 0
        inner.reset_tail()
        give_back(inner)
        return self._extension(REGISTERED, doc)


_Handler = Callable[[Encoder, Any], Any]
_BY_KIND: dict[str, _Handler] = {
    "array": Encoder.pack_array,
    "scalar": Encoder.pack_scalar,
    "tensor": Encoder.pack_tensor,
}
_handlers: dict[type, _Handler] = {tuple: Encoder.pack_tuple, ExtType: Encoder.pack_extension}
_idle: list[Encoder] = []


def add_registration(entry: Registration) -> None:
    """Makes `entry` known to both directions, in place of an older one of the same name."""
    if previous := by_name.get(entry.name):
        by_type.pop(previous.cls, None)
        _handlers.pop(previous.cls, None)
    by_name[entry.name] = by_type[entry.cls] = entry
    _handlers[entry.cls] = Encoder.pack_registered


def _find_handler(cls: type) -> _Handler | None:
    kind = kind_of(cls)
    if kind is None:
        return Encoder.pack_tuple if issubclass(cls, tuple) else None
    _handlers[cls] = _BY_KIND[kind]
    return _BY_KIND[kind]


def _as_base(value: Any) -> Any:
    """What a subclass of a plain type is on the wire: exactly its base, whatever it overrides."""
    if isinstance(value, dict):
        return dict(cast("dict[Any, Any]", value))
    if isinstance(value, list):
        return list(cast("list[Any]", value))
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return _base_int(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, (bytes, bytearray)):
        return bytes(memoryview(value))
    raise why_unknown(value)


def _base_int(value: int) -> int:
    plain = int.__int__(value)
    if not -(1 << 63) <= plain < 1 << 64:
        bits = plain.bit_length()
        raise Refused(f"is an int of {bits} bits, and msgpack carries 64; convert it to a str or a float")
    return plain


def borrow() -> Encoder:
    """An encoder of one's own; a failed one is simply not given back."""
    try:
        return _idle.pop()
    except IndexError:
        return Encoder()


def give_back(encoder: Encoder, doc_size: int = 0) -> None:
    """Lets others reuse `encoder`, unless a large document has swollen its buffer."""
    if encoder.size:
        encoder.reset_tail()
    if doc_size < _KEEP_BELOW and len(_idle) < _KEEP_ENCODERS:
        _idle.append(encoder)


def explain(value: object, where: str, cause: Exception) -> EncodeError:
    """The EncodeError for a value that could not be packed."""
    return encode_error(value, where, cause, try_pack=Encoder().pack, opaque=by_type)


def lay_out(encoder: Encoder, docs: list[bytes], where: str) -> list[Buffer]:
    """The payload's buffers: header, the doc in its pieces, and the tail."""
    length = sum(map(len, docs))
    if not encoder.size:
        return _joined([HEAD.pack(0x93, 0xCE, _fits(length, where)), *docs, _EMPTY_TAIL], length)
    gap = -(HEAD.size + length + _TAIL_HEAD.size) % ALIGNMENT
    tail_head = _TAIL_HEAD.pack(0xC6, _fits(gap + encoder.size, where)) + _PADDING[:gap]
    head = [HEAD.pack(0x93, 0xCE, _fits(length, where)), *docs, tail_head]
    return _joined(head, length) + encoder.views


_EMPTY_TAIL = _TAIL_HEAD.pack(0xC6, 0)


def _joined(pieces: list[bytes], length: int) -> list[Buffer]:
    # One small copy is cheaper than three writes, a large one is not.
    return [b"".join(pieces)] if length < _JOIN_BELOW else [*pieces]


def _fits(length: int, where: str) -> int:
    if length >= 1 << 32:
        raise EncodeError(f"{where} takes {length} bytes, and one payload carries less than 4 GiB; send it in parts")
    return length


def _packer(**options: Any) -> Any:
    return cast("Callable[..., Any]", msgpack.Packer)(use_bin_type=True, **options)


def _refuse_list_keys(doc: bytes) -> None:
    try:
        _unpackb(doc, ext_hook=_nothing, strict_map_key=False)
    except TypeError as error:
        raise Refused(f"cannot be a key: {error}") from None


def _nothing(code: int, data: bytes) -> None:
    return None


class Decoder:
    """Unpacks the documents of one payload; arrays become views into it."""

    __slots__ = ("_base", "_copied", "_depth", "_doc_end", "_view", "_writable", "saw_registered", "shared")

    def __init__(self, view: memoryview, doc_end: int, *, writable: bool = False) -> None:
        self._view = view
        self._base = doc_end + _TAIL_HEAD.size + -(doc_end + _TAIL_HEAD.size) % ALIGNMENT
        self._writable = writable
        self._copied = 0
        self._depth = 0
        self._doc_end = doc_end
        self.saw_registered = False
        self.shared: Callable[[bytes], Any] | None = None

    def unpack_doc(self) -> Any:
        """The value of the payload's whole doc."""
        return self.unpack(self._view[HEAD.size : self._doc_end])

    def unpack(self, doc: memoryview | bytes) -> Any:
        """The value of one msgpack document."""
        try:
            if len(doc) <= _TRUSTED_LIST_LENGTH:
                return _unpackb(doc, ext_hook=self._extension, strict_map_key=False)
            return self._unpack_long(doc)
        except DecodeError:
            raise
        except _DECODE_FAILURES as error:
            raise _malformed(error) from None

    def _unpack_long(self, doc: memoryview | bytes) -> Any:
        copied = self._copied
        try:
            return _unpackb(doc, ext_hook=self._extension, strict_map_key=False, max_array_len=_TRUSTED_LIST_LENGTH)
        except DecodeError:
            raise
        except ValueError:
            # A longer list, or a fault: skipping through the document allocates nothing and tells which.
            self._copied = copied
            _skip_through(doc)
            return _unpackb(doc, ext_hook=self._extension, strict_map_key=False)

    def _extension(self, code: int, data: bytes) -> Any:
        if code in (ARRAY, TENSOR):
            return self._leaf(code, data)
        if code == SHARED and self.shared is not None:
            return self.shared(data)
        if code == SCALAR:
            return self._scalar(data)
        if code == REGISTERED:
            return self._registered(data)
        raise DecodeError(
            f"payload holds the extension type {code}, which does not belong here"
            + (": it is a group of rows, read it with decode_rows" if code == SHARED else "")
        )

    def _leaf(self, code: int, data: bytes) -> Any:
        fields: Any = _quick_unpackb(data)
        if class_of(fields) is not list or not 3 <= len(fields) <= 4:
            raise DecodeError("payload holds an array whose description is malformed")
        token, shape = fields[0], fields[1]
        if class_of(token) is not str or class_of(shape) is not list or not _ONLY_INTS.issuperset(map(type, shape)):
            raise DecodeError("payload holds an array whose dtype or shape is malformed")
        raw: Any = self._slice(fields[2], fields[3]) if len(fields) == 4 else fields[2]
        if code == ARRAY and not self._writable:
            return make_array(token, shape, raw)
        self._copied += len(raw)
        # Honest payloads hold each array once, so together they copy less than the payload's own size.
        if self._copied > len(self._view):
            raise DecodeError("payload refers to the same bytes more than once, so copying them would never end")
        made = (make_tensor if code == TENSOR else make_array)(token, shape, raw)
        return made if code == TENSOR else made.copy()

    def _slice(self, offset: Any, size: Any) -> memoryview:
        if type(offset) is not int or type(size) is not int or offset < 0 or size < 0:
            raise DecodeError("payload holds an array whose place is malformed")
        start = self._base + offset
        if start + size > len(self._view):
            raise DecodeError(f"payload holds an array of {size} bytes that ends outside of it; it was cut or altered")
        return self._view[start : start + size]

    def _scalar(self, data: bytes) -> Any:
        fields = _unpackb(data, use_list=False)
        if not isinstance(fields, tuple) or list(map(type, cast("tuple[Any, ...]", fields))) != [str, bytes]:
            raise DecodeError("payload holds a numpy scalar whose description is malformed")
        return make_scalar(*cast("tuple[str, bytes]", fields))

    def _registered(self, data: bytes) -> Any:
        if self._depth == MAX_REGISTERED_DEPTH:
            raise DecodeError(f"payload nests registered types more than {MAX_REGISTERED_DEPTH} deep")
        self.saw_registered = True
        self._depth += 1
        fields = self.unpack(data)
        self._depth -= 1
        if not isinstance(fields, list) or len(cast("list[Any]", fields)) != 2:
            raise DecodeError("payload holds a registered type whose description is malformed")
        name, value = cast("list[Any]", fields)
        entry = by_name.get(name) if isinstance(name, str) else None
        if entry is None:
            raise DecodeError(
                f"payload holds a {name!r:.80}, which nothing in this process has registered; "
                "import the module that calls codec.register for it"
            )
        try:
            return entry.unpack(value)
        except Exception as error:
            raise DecodeError(f"payload holds a {name}, whose unpack function raised {error!r}") from error


def open_payload(payload: Payload) -> tuple[memoryview, int]:
    """A read-only view of the payload and where its doc ends; checks the layout."""
    try:
        view = memoryview(payload)
        if not view.readonly or view.format != "B" or view.ndim != 1:
            view = view.toreadonly().cast("B")
        marker, doc_marker, length = HEAD.unpack_from(view)
        doc_end = HEAD.size + length
        tail_marker, tail_length = _TAIL_HEAD.unpack_from(view, doc_end)
    except (TypeError, struct.error) as error:
        raise _malformed(error) from None
    if (marker, doc_marker, tail_marker) != (0x93, 0xCE, 0xC6):
        raise DecodeError("payload does not have the layout [length, doc, tail]; rolloutbus did not write it")
    if doc_end + _TAIL_HEAD.size + tail_length != len(view):
        raise DecodeError(f"payload has {len(view)} bytes, which is not what it says; it was cut or altered")
    return view, doc_end


def _malformed(error: BaseException) -> DecodeError:
    return DecodeError(f"payload is malformed, cut or altered: {str(error) or type(error).__name__}")


def _skip_through(doc: memoryview | bytes) -> None:
    unpacker: Any = cast("Callable[..., Any]", msgpack.Unpacker)(max_buffer_size=len(doc), strict_map_key=False)
    unpacker.feed(doc)
    unpacker.skip()
