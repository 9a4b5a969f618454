"""numpy arrays and scalars and torch tensors as raw bytes.

Owns which dtypes may travel and how they are named. Neither library is imported to encode (whoever holds an array has
it already); decoding imports the one it needs. Objects, structured and unknown dtypes are refused in both directions.
"""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .codec_refusals import Refused
from .errors import DecodeError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_NUMPY_TOKEN = re.compile(
    r"[<>|=]?(?:b1|[iu][1248]|f[248]|c(?:8|16)|(?:f1[026]|c(?:20|24|32)):\d{2,3}"
    r"|[mM]8(?:\[\d{0,9}(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?|[SU][1-9]\d{0,8})"
)
_TORCH_DTYPE = re.compile(
    r"bool|u?int(?:8|16|32|64)|b?float16|float(?:32|64)|complex(?:32|64|128)"
    r"|float8_(?:e4m3fn|e4m3fnuz|e5m2|e5m2fnuz|e8m0fnu)"
)
_STRING_SCALARS = {"U": "str_", "S": "bytes_"}


def kind_of(cls: type) -> str | None:
    """`"array"`, `"scalar"`, `"tensor"`, or None for any other class; nothing is imported to tell."""
    package = cls.__module__.partition(".")[0]
    if package not in ("numpy", "torch") or package not in sys.modules:
        return None
    library: Any = sys.modules[package]
    if package == "torch":
        return "tensor" if cls in (library.Tensor, library.nn.Parameter) else None
    # Other subclasses of ndarray hold more than their bytes (a masked array its mask), which would be lost.
    if cls in (library.ndarray, library.memmap):
        return "array"
    return "scalar" if issubclass(cls, library.generic) else None


@lru_cache(maxsize=256)
def dtype_token(dtype: np.dtype[Any]) -> str:
    """The wire name of a numpy dtype; long doubles carry their mantissa's width, which differs between machines."""
    token = dtype.str
    if dtype.kind in "fc" and dtype.itemsize > (8 if dtype.kind == "f" else 16):
        token += f":{_mantissa_of_long_double()}"
    if dtype.kind == "V" or not _NUMPY_TOKEN.fullmatch(token):
        raise Refused(
            f"has the numpy dtype {dtype}, which cannot be carried as raw bytes; "
            "convert it to a list, to a plain dtype, or send its fields as arrays of their own"
        )
    return token


@lru_cache(maxsize=256)
def _dtype_of(token: str) -> np.dtype[Any]:
    numpy = _library("numpy")
    if not _NUMPY_TOKEN.fullmatch(token):
        raise DecodeError(f"payload names the numpy dtype {token[:80]!r}, which is not one that may travel")
    name, _, mantissa = token.partition(":")
    if mantissa and int(mantissa) != _mantissa_of_long_double():
        raise DecodeError("payload holds long doubles of another machine's width; send float64 instead")
    try:
        return numpy.dtype(name)
    except (TypeError, ValueError) as error:
        raise DecodeError(f"payload names the numpy dtype {name!r}, which this numpy does not have: {error}") from None


def _mantissa_of_long_double() -> int:
    numpy: Any = sys.modules["numpy"]
    return int(numpy.finfo(numpy.longdouble).nmant)


def array_bytes(array: NDArray[Any]) -> memoryview:
    """The array's bytes in C order; a view wherever the array is contiguous already."""
    try:
        return memoryview(array).cast("B")  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        # Strides, other byte orders, dates, long doubles, nothing at all: what the buffer protocol does not say.
        pass
    if not array.flags.c_contiguous:
        array = array.copy(order="C")
    flat = array if array.ndim == 1 else array.reshape(-1)
    return flat.view("u1").data


def scalar_parts(scalar: np.generic) -> tuple[str, bytes]:
    """Wire name and bytes of a numpy scalar; strings keep trailing zeros, which an array would drop."""
    value: Any = scalar
    if isinstance(value, str):
        return "U", value.encode()
    if isinstance(value, bytes):
        return "S", bytes(memoryview(value))
    return dtype_token(scalar.dtype), scalar.tobytes()


def tensor_parts(tensor: Any) -> tuple[str, tuple[int, ...], Any]:
    """Wire name, shape, and the bytes (as a numpy uint8 array) of a torch tensor, moved to the CPU and detached."""
    name = str(tensor.dtype).removeprefix("torch.")
    if not _TORCH_DTYPE.fullmatch(name) or str(tensor.layout) != "torch.strided" or tensor.is_meta:
        raise Refused(
            f"is a torch tensor of dtype {name}, layout {tensor.layout}, device {tensor.device}, which cannot be "
            "carried as raw bytes; make it a dense tensor of a plain dtype"
        )
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if not plain.numel():
        return name, tuple(tensor.shape), b""
    try:
        raw = plain.reshape(-1).view(sys.modules["torch"].uint8).numpy()
    except RuntimeError as error:
        raise Refused(f"is a torch tensor whose bytes cannot be read ({error}); install numpy beside torch") from None
    return name, tuple(tensor.shape), raw


def make_array(token: str, shape: Sequence[int], raw: memoryview | bytes) -> NDArray[Any]:
    """A read-only numpy array over `raw`; DecodeError where the three do not fit together, whatever they are."""
    try:
        dtype = _dtype_of(token)
        _check_size(token, shape, raw, dtype.itemsize)
        # Not `ndarray` with a buffer, which looks through a memoryview and forgets that it has one: the memory would be
        # taken for free while the array lives. An empty one has none.
        numpy = _library("numpy")
        flat = numpy.frombuffer(raw, dtype) if len(raw) else numpy.ndarray(0, dtype, b"")
        return flat if len(shape) == 1 else flat.reshape(shape)
    except DecodeError:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        raise _malformed("an array", "numpy", shape, error) from None


def _check_size(token: str, shape: Sequence[int], raw: memoryview | bytes, itemsize: int) -> None:
    if len(raw) != math.prod(shape) * itemsize:
        raise DecodeError(f"payload holds an array of shape {shape!r:.200} and {token!r:.80} whose bytes do not match")


def _malformed(what: str, library: str, shape: object, error: Exception) -> DecodeError:
    return DecodeError(f"payload holds {what} of shape {shape!r:.200}, which {library} refuses: {error}")


def make_scalar(token: str, raw: bytes) -> Any:
    """A numpy scalar."""
    numpy = _library("numpy")
    if token in _STRING_SCALARS:
        return getattr(numpy, _STRING_SCALARS[token])(raw.decode() if token == "U" else raw)
    dtype = _dtype_of(token)
    if len(raw) != dtype.itemsize:
        raise DecodeError(f"payload holds a numpy {token} scalar of {len(raw)} bytes instead of {dtype.itemsize}")
    return numpy.frombuffer(raw, dtype)[0]


def make_tensor(token: str, shape: Sequence[int], raw: memoryview | bytes) -> Any:
    """A CPU tensor that owns its memory; DecodeError where the three do not fit together, whatever they are."""
    torch = _library("torch")
    try:
        dtype = _torch_dtype(token)
        _check_size(token, shape, raw, dtype.itemsize)
        # A bytearray of its own: torch warns about, and may write through, a buffer that is read-only.
        flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        return flat.view(dtype).reshape(shape)
    except DecodeError:
        raise
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise _malformed("a tensor", "torch", shape, error) from None


def _torch_dtype(token: str) -> Any:
    torch = _library("torch")
    if not _TORCH_DTYPE.fullmatch(token) or not hasattr(torch, token):
        raise DecodeError(f"payload names the torch dtype {token[:80]!r}, which this torch does not have")
    return getattr(torch, token)


def _library(name: str) -> Any:
    try:
        return sys.modules.get(name) or importlib.import_module(name)
    except ImportError:
        what = "a torch tensor" if name == "torch" else "a numpy array"
        raise DecodeError(f"payload holds {what}, and {name} is not installed here; install {name}") from None
