"""What a network expects of the files that hold its weights (names, shapes, which way round), and what these hold."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightLayout:
    """The weights of a network.

    Attributes:
        shapes: canonical name -> shape of every weight that there must be; linears are [out, in].
        prefix: what names in files may begin with; canonical ones do not.
        embedding: name of the token embedding.
        head: name of the LM head, in `shapes` only when untied.
        turned: names of those that files store [in, out].
        ignored: names of constants that old files carry.
    """

    shapes: Mapping[str, tuple[int, ...]]
    prefix: str
    embedding: str
    head: str
    turned: re.Pattern[str] | None
    ignored: re.Pattern[str]

    @property
    def is_tied(self) -> bool:
        """Whether the LM head is the token embedding."""
        return self.head not in self.shapes

    def is_turned(self, name: str) -> bool:
        """By name, never by shape: a square matrix does not tell which way round it lies."""
        return self.turned is not None and self.turned.fullmatch(name) is not None


class StoredTensor(Protocol):
    """A tensor in a file, by the file's header."""

    @property
    def path(self) -> Path:
        """The file."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def shape(self) -> list[int]:
        """Its shape as it is stored."""

    @property
    def dtype(self) -> str:
        """What is read, as safetensors calls it."""

    @property
    def is_mapped(self) -> bool:
        """Whether what is read is the file itself, mapped into memory."""

    def read(self) -> torch.Tensor:
        """The tensor as it is stored."""
