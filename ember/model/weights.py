"""A network's weights, read from a model folder's safetensors files or from a GGUF file.

Whatever the file's naming, orientation, dtype and head, what comes out has one naming, linears `[out, in]`, one dtype.
The files are not trusted: each is checked against the config before one tensor is read, and a pickle, which runs code,
is never read. A tensor is read when it is asked for, its file mapped no longer than that: of a network that packs its
weights as it takes them, nothing is in memory twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ember.errors import UserError
from ember.model.gguf_file import GgufFile, is_gguf
from ember.model.gguf_network import gguf_tensors
from ember.model.json_file import one_line, read_json_object, show
from ember.model.weight_layout import StoredTensor, WeightLayout

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")
Cut = Callable[[str, torch.Tensor], torch.Tensor]
"""The part of a weight, by its canonical name, that is wanted."""
_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a file, by the file's header."""

    path: Path
    name: str
    shape: list[int]
    dtype: str
    is_mapped: bool = True

    def read(self) -> torch.Tensor:
        """The tensor as it lies in the file, mapped; the mapping ends with it."""
        with safe_open(self.path, framework="pt", device="cpu") as file:
            tensor: torch.Tensor = file.get_tensor(self.name)
            return tensor


class Weights(Mapping[str, torch.Tensor]):
    """Canonical name -> weight, read from its file each time; nothing is kept.

    Raises:
        UserError: on reading, a file that has changed, is gone or can't be read.
    """

    def __init__(
        self,
        stored: Mapping[str, StoredTensor],
        folder: Path,
        layout: WeightLayout,
        dtype: torch.dtype,
        device: torch.device,
        cut: Cut | None = None,
    ) -> None:
        self._stored, self._folder, self._layout = stored, folder, layout
        self._dtype, self._device, self._cut = dtype, device, cut

    def __getitem__(self, name: str) -> torch.Tensor:
        try:
            stored = self._stored[name]
            tensor = stored.read().T if self._layout.is_turned(name) else stored.read()
            wanted = tensor if self._cut is None else self._cut(name, tensor)
            return _load(wanted, stored.is_mapped, self._dtype, self._device)
        except (SafetensorError, OSError) as error:
            raise _unreadable(self._folder, error) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def load_weights(
    folder: Path, layout: WeightLayout, *, dtype: torch.dtype, device: torch.device, cut: Cut | None = None
) -> Weights:
    """Every weight under its canonical name, contiguous, in `dtype` on `device`; only the files' headers are read yet.

    Returns: what `layout.shapes` asks for, in these shapes, or what `cut` leaves of them.

    Raises:
        UserError: no safetensors files, one is broken or missing, a tensor is missing, extra, of another shape or not
            of floats, or the head contradicts `tie_word_embeddings`. Names file, tensor and shapes.
    """
    stored = _canonical(_headers(folder), layout)
    try:
        _settle_head(stored, layout, folder)
    except (SafetensorError, OSError) as error:
        raise _unreadable(folder, error) from None
    _check(stored, layout, folder)
    return Weights({name: stored[name] for name in layout.shapes}, folder, layout, dtype, device, cut)


def _unreadable(folder: Path, error: Exception) -> UserError:
    return UserError(f"{folder}: the weights can't be read ({one_line(error)})")


def _headers(folder: Path) -> list[StoredTensor]:
    """Every tensor of the folder or GGUF file. A single file wins over shards, as in transformers."""
    if is_gguf(folder):
        return list(gguf_tensors(GgufFile.open(folder)))
    if (folder / SINGLE).exists():
        return _header(folder / SINGLE)
    if not (folder / INDEX).exists():
        raise UserError(_no_weights(folder))
    tensors: list[StoredTensor] = []
    for shard, names in _shards(folder / INDEX).items():
        found = _header(folder / shard)
        _check_shard(folder / shard, set(names), {tensor.name for tensor in found})
        tensors += found
    return tensors


def _header(path: Path) -> list[StoredTensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            slices: dict[str, Any] = {name: file.get_slice(name) for name in list(file.keys())}
            return [_Stored(path, name, list(s.get_shape()), s.get_dtype()) for name, s in slices.items()]
    except FileNotFoundError:
        raise UserError(f"{path}: a shard that {INDEX} names is missing; download the model again") from None
    except (SafetensorError, OSError) as error:
        reason = f"broken or cut short ({one_line(error)})"
        raise UserError(f"{path}: not a whole safetensors file, {reason}; download it again") from None


def _no_weights(folder: Path) -> str:
    only = "only pytorch_model.bin, " if any(folder.glob("pytorch_model*.bin")) else f"no {SINGLE} and no {INDEX}; "
    return (
        f"{folder}: {only}but ember reads safetensors only (a .bin is a pickle and can run code); convert with "
        "transformers: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW, safe_serialization=True)"
    )


def _shards(index: Path) -> dict[str, list[str]]:
    """Shard file name -> the tensors that the index promises in it."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: weight_map must be an object of tensor names and file names")
    shards: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _SHARD.fullmatch(shard):
            raise UserError(f"{index}: {show(name)} lies in {show(shard)}, which is no plain .safetensors file name")
        shards.setdefault(shard, []).append(name)
    return shards


def _check_shard(path: Path, promised: set[str], found: set[str]) -> None:
    if absent := sorted(map(show, promised - found)):
        raise UserError(f"{path}: {_some(absent)} should be here by {INDEX}, but is not")
    if extra := sorted(map(show, found - promised)):
        raise UserError(f"{path}: {_some(extra)} is here, but not by {INDEX}")


def _canonical(tensors: list[StoredTensor], layout: WeightLayout) -> dict[str, StoredTensor]:
    """By names without the prefix; without what is ignored."""
    stored: dict[str, StoredTensor] = {}
    for tensor in tensors:
        name = tensor.name.removeprefix(layout.prefix)
        if layout.ignored.fullmatch(name):
            continue
        if name in stored:
            raise UserError(f"{tensor.path}: {show(name)} is there twice, with and without the prefix {layout.prefix}")
        stored[name] = tensor
    return stored


def _settle_head(stored: dict[str, StoredTensor], layout: WeightLayout, folder: Path) -> None:
    """Tied: one matrix, as the embedding, whichever of the two names it is stored under; if both, they must agree."""
    if not layout.is_tied or layout.head not in stored:
        return
    head = stored.pop(layout.head)
    wte = stored.setdefault(layout.embedding, head)
    if wte is not head and (wte.dtype != head.dtype or not torch.equal(wte.read(), head.read())):
        raise UserError(
            f"{folder}: {layout.head} differs from {layout.embedding}, but the config ties them (tie_word_embeddings); "
            f"set tie_word_embeddings: false in config.json if the model has its own head, else remove {layout.head}"
        )


def _check(stored: dict[str, StoredTensor], layout: WeightLayout, folder: Path) -> None:
    """What is there is what must be there, by the files' headers alone."""
    shapes = layout.shapes
    if missing := [f"{name} {list(shape)}" for name, shape in shapes.items() if name not in stored]:
        raise UserError(f"{folder}: the weights lack {_some(missing)}, which config.json asks for")
    if extra := sorted(show(stored[name].name) for name in stored.keys() - shapes.keys()):
        raise UserError(f"{folder}: the weights hold {_some(extra)}, which config.json has no place for")
    wrong = []
    for name, shape in shapes.items():
        tensor, expected = stored[name], list(shape[::-1] if layout.is_turned(name) else shape)
        if tensor.shape != expected:
            wrong.append(f"{tensor.name} has shape {tensor.shape}, expected {expected}")
        elif tensor.dtype not in _FLOATS:
            wrong.append(f"{tensor.name} is {tensor.dtype}, expected one of {', '.join(_FLOATS)}")
    if wrong:
        raise UserError(f"{folder}: the weights do not fit config.json: {_some(wrong)}")


def _load(tensor: torch.Tensor, is_mapped: bool, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One copy, which turns and casts too. Never the mapping itself: a file cut short later would kill the process."""
    if not is_mapped:
        return tensor.contiguous().to(device, dtype)
    return torch.empty(tensor.shape, dtype=dtype, device=device).copy_(tensor)


def _some(items: Sequence[str]) -> str:
    return "; ".join(items[:3]) + (f" and {len(items) - 3} more" if len(items) > 3 else "")
