"""A GGUF file: what its header says, and its tensors, de-quantised as they are read (the extra `gguf`).

The header is read here and not by the `gguf` package, whose reader takes seconds for a large vocabulary and trusts the
file. The numbers are the package's affair. Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3,
little-endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ember.errors import UserError

if TYPE_CHECKING:
    import torch

SUFFIX = ".gguf"
_STRING, _ARRAY = 8, 9
_SCALARS: Mapping[int, str] = MappingProxyType(
    {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
)
_MOST_DIMS = 4
_MOST_FIELDS = 2**20
_CHUNK = 2**22
"""Numbers de-quantised at a time: next to nothing of a large matrix lies in memory twice."""


def is_gguf(path: Path) -> bool:
    """Whether a model's path means a GGUF file."""
    return path.suffix == SUFFIX


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of the file.

    Attributes:
        name: its name in the file.
        shape: as PyTorch has it, the last dimension the fastest.
        kind: the number of its type in ggml.
        offset: where it begins in the file.
        heads: where the numbers that turn together lie side by side, in rows of q and k: heads in these rows.
        dtype: of what is read.
    """

    path: Path
    name: str
    shape: list[int]
    kind: int
    offset: int
    heads: int = 0
    dtype: str = "F32"
    is_mapped: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes in the file."""
        return math.prod(self.shape[:-1]) * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        block, size = _block(self.kind)
        if self.shape[-1] % block:
            raise ValueError(f"rows of {self.name} are no whole blocks of {block} numbers")
        return self.shape[-1] // block * size

    def read(self) -> torch.Tensor:
        """In float32; rows 0, 2, 4, ... of a head come before 1, 3, 5, ... where they lay in pairs."""
        import numpy as np
        import torch  # a tokenizer does without
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        row = self._row_bytes
        rows = max(1, _CHUNK // self.shape[-1])
        out = torch.empty(math.prod(self.shape) // self.shape[-1], self.shape[-1])
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for begin in range(0, len(out), rows):
                part = out[begin : begin + rows]
                raw = file.read(row * len(part))
                if len(raw) < row * len(part):
                    raise OSError(f"{self.name} is cut short")
                numbers = np.frombuffer(bytearray(raw), np.uint8).reshape(len(part), row)
                part.copy_(torch.from_numpy(dequantize(numbers, GGMLQuantizationType(self.kind))))
        out = out.view(self.shape)
        return out.view(self.heads, -1, 2, *out.shape[1:]).transpose(1, 2).reshape(out.shape) if self.heads else out


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a file: its metadata by key, and its tensors by name."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @staticmethod
    def open(path: Path) -> GgufFile:
        """Read the header.

        Raises:
            UserError: no GGUF file, another version, broken, cut short, or quantised in a way that is not supported.
        """
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, _Reader(data))
        except (OSError, ValueError, struct.error, UnicodeDecodeError, OverflowError) as error:
            if isinstance(error, UserError):
                raise UserError(f"{path}: {error}") from None
            raise UserError(f"{path}: not a whole GGUF file ({str(error)[:100]}); download it again") from None

    def text(self, key: str, default: str | None = None) -> str | None:
        """A text of the metadata.

        Raises:
            UserError: it is no text.
        """
        value = self.metadata.get(key, default)
        if value is not None and not isinstance(value, str):
            raise UserError(f"{self.path}: {key} must be a text")
        return value

    def items(self, key: str, kind: type) -> list[Any]:
        """A list of the metadata; empty if it is not there.

        Raises:
            UserError: it is no list of that kind.
        """
        value = self.metadata.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise UserError(f"{self.path}: {key} must be a list of {kind.__name__}")
        return value


class _Reader:
    """Takes one value after another out of the header."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        """The next bytes."""
        if size > len(self.data) - self.at:
            raise ValueError("it is cut short")
        self.at += size
        return self.data[self.at - size : self.at]

    def scalar(self, form: str) -> Any:
        """A number or a bool."""
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def count(self) -> int:
        """A number of things that the file holds."""
        value: int = self.scalar("<Q")
        if value > len(self.data):
            raise ValueError("it counts more than it holds")
        return value

    def string(self) -> str:
        """A text."""
        return self.take(self.count()).decode(errors="surrogateescape")

    def value(self, kind: int) -> Any:
        """A value of a kind."""
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_form(kind))
        inner, count = self.scalar("<I"), self.count()
        if inner == _STRING:
            return [self.string() for _ in range(count)]
        form = _form(inner)
        return list(struct.unpack(f"<{count}{form[1]}", self.take(count * struct.calcsize(form))))


def _form(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"it holds a value of the unknown kind {kind}")
    return _SCALARS[kind]


def _parse(path: Path, reader: _Reader) -> GgufFile:
    if reader.take(4) != b"GGUF":
        raise UserError("not a GGUF file")
    version = reader.scalar("<I")
    if version not in (2, 3):
        raise UserError(f"GGUF version {version} is not supported; 2 and 3 are")
    num_tensors, num_fields = reader.count(), reader.count()
    if max(num_tensors, num_fields) > _MOST_FIELDS:
        raise ValueError("it counts more than it holds")
    metadata = {}
    for _ in range(num_fields):
        key = reader.string()
        metadata[key] = reader.value(reader.scalar("<I"))
    infos = [_info(reader) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError("its alignment is wrong")
    start = -(-reader.at // alignment) * alignment
    tensors = {
        name: GgufTensor(path, name, shape, kind, start + offset) for name, shape, kind, offset in infos if all(shape)
    }
    if len(tensors) < num_tensors:
        raise ValueError("two tensors have one name, or one has no numbers")
    for tensor in tensors.values():
        if tensor.offset + tensor.num_bytes > len(reader.data):
            raise ValueError(f"{tensor.name} is cut short")
    return GgufFile(path, MappingProxyType(metadata), MappingProxyType(tensors))


def _info(reader: _Reader) -> tuple[str, list[int], int, int]:
    """A tensor's name, shape, kind and offset."""
    name, num_dims = reader.string(), reader.scalar("<I")
    if not 1 <= num_dims <= _MOST_DIMS:
        raise ValueError(f"{name} has {num_dims} dimensions")
    shape = [reader.scalar("<Q") for _ in range(num_dims)][::-1]
    return name, shape, reader.scalar("<I"), reader.scalar("<Q")


@cache
def _block(kind: int) -> tuple[int, int]:
    """Numbers in a block of the kind, and its bytes; tried, since the package lists kinds that it can't read."""
    try:
        import numpy as np
        from gguf import GGMLQuantizationType
        from gguf.constants import GGML_QUANT_SIZES
        from gguf.quants import dequantize
    except ImportError:
        raise UserError("needs the package gguf to read it; pip install 'ember-batch[gguf]'") from None
    try:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        dequantize(np.zeros((1, size), np.uint8), GGMLQuantizationType(kind))
    except (ValueError, KeyError, NotImplementedError):
        raise UserError(f"has a tensor of ggml's type {kind}, which the package gguf can't read") from None
    return block, size
