"""Torch tensors through the codec.

Needs torch, which the test extra does not bring: the folder's conftest.py collects this file only where torch is
installed. To run it: `pip install torch` beside the test extra, then `pytest tests/broker/torch`.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any

import pytest
from rolloutbus.broker import codec
from rolloutbus.broker.errors import DecodeError, EncodeError

# By name, because a type checker without torch could not resolve an import of it.
torch: Any = importlib.import_module("torch")
DTYPES = [
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip


def joined(value: object) -> bytes:
    return b"".join(codec.encode(value))


def bits(tensor: Any) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 2), (40, 50)])
def test_every_dtype_comes_back_bit_for_bit(name: str, shape: tuple[int, ...]) -> None:
    dtype = getattr(torch, name)
    count = 1
    for side in shape:
        count *= side
    raw = torch.arange(count * dtype.itemsize) % (2 if name == "bool" else 251)
    tensor = raw.to(torch.uint8).view(dtype).reshape(shape)
    got = codec.decode(joined({"t": tensor}))["t"]
    assert got.dtype == dtype
    assert got.shape == tensor.shape
    assert bits(got) == bits(tensor)


def test_a_tensor_owns_its_memory_and_may_be_written_to() -> None:
    payload = joined([torch.zeros(1000), torch.zeros(2)])
    got = codec.decode(payload)
    for tensor in got:
        tensor += 1
    assert [tensor.sum() for tensor in codec.decode(payload)] == [0, 0]


def test_a_large_tensor_is_sent_without_a_copy() -> None:
    tensor = torch.zeros(5000)
    (view,) = (buffer for buffer in codec.encode(tensor) if isinstance(buffer, memoryview))
    tensor[0] = 1
    assert bytes(view[:4]) == b"\x00\x00\x80\x3f"


def test_views_gradients_and_parameters_come_back_as_plain_tensors() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    cases = [base.t(), base[:, ::2], torch.nn.Parameter(base), base.clone().requires_grad_(), (base + 1j).conj()]
    for tensor in cases:
        got = codec.decode(joined(tensor))
        assert type(got) is torch.Tensor
        assert not got.requires_grad
        assert torch.equal(got, tensor.detach().resolve_conj())


def test_tensors_without_plain_bytes_are_refused() -> None:
    for tensor in (torch.zeros(3).to_sparse(), torch.zeros(3, device="meta")):
        with pytest.raises(EncodeError, match="value: a is a torch tensor of dtype float32, layout torch"):
            codec.encode({"a": tensor})


def test_siblings_get_tensors_of_their_own() -> None:
    rows = [{"t": torch.zeros(1000), "_rowidx": index} for index in range(3)]
    buffers = codec.encode_rows(rows, first_row=0)
    got = codec.decode_rows(b"".join(buffers))
    got[0]["t"] += 1
    assert codec.size_of(buffers) < 5000
    assert [float(row["t"].sum()) for row in got] == [1000, 0, 0]


def test_an_unknown_dtype_and_a_missing_torch_are_decode_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = joined(torch.zeros(2))
    with pytest.raises(DecodeError, match="torch dtype 'storage', which this torch does not have"):
        codec.decode(payload.replace(b"float32", b"storage"))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(DecodeError, match="holds a torch tensor, and torch is not installed here; install torch"):
        codec.decode(payload)


def test_torch_is_imported_only_to_decode_a_tensor() -> None:
    program = (
        "import sys; from rolloutbus.broker import codec; codec.decode(bytes.fromhex(sys.argv[1]));"
        "print('torch' in sys.modules)"
    )
    for value, imported in (([1, 2], "False"), (torch.zeros(2), "True")):
        done = subprocess.run(
            [sys.executable, "-c", program, joined(value).hex()], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == imported
