"""A GPT-2 network's weights, read from a model folder's safetensors files.

Whatever the file's naming, orientation, dtype and head, what comes out has one naming, linears `[out, in]`, one dtype.
The files are not trusted: each is checked against the config before one tensor is read, and only safetensors is read
(a pickle runs code). A tensor is read when it is asked for, its file mapped no longer than that: of a network that
packs its weights as it takes them, nothing is in memory twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ember.errors import UserError
from ember.model.gpt2_config import GPT2Config
from ember.model.json_file import one_line, read_json_object, show

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")
_CAUSAL_MASK = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")  # constants that old files carry; not c_attn.bias
_LINEAR = re.compile(r"h\.\d+\.(attn|mlp)\.c_\w+\.weight")
_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
_WTE, _HEAD = "wte.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a file, by the file's header."""

    path: Path
    name: str
    shape: list[int]
    dtype: str

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
        self, stored: Mapping[str, _Stored], folder: Path, config: GPT2Config, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._stored, self._folder, self._config = stored, folder, config
        self._dtype, self._device = dtype, device

    def __getitem__(self, name: str) -> torch.Tensor:
        try:
            return _load(self._stored[name], name, self._config, self._dtype, self._device)
        except (SafetensorError, OSError) as error:
            raise _unreadable(self._folder, error) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def load_weights(folder: Path, config: GPT2Config, *, dtype: torch.dtype, device: torch.device) -> Weights:
    """Every weight under its canonical name, contiguous, in `dtype` on `device`; only the files' headers are read yet.

    Returns: with C = n_embd, V = vocab_size, P = max_position, I = n_inner, Q = C + 2 * n_kv_head * head_dim:
        wte.weight [V, C], wpe.weight [P, C], ln_f.{weight,bias} [C], lm_head.weight [V, C] only when untied, and for
        each layer h.{i}: ln_1 and ln_2 {weight,bias} [C], attn.c_attn [Q, C] and attn.c_proj [C, C],
        mlp.c_fc [I, C] and mlp.c_proj [C, I], each with its bias [out].

    Raises:
        UserError: no safetensors files, one is broken or missing, a tensor is missing, extra, of another shape or not
            of floats, or the head contradicts `tie_word_embeddings`. Names file, tensor and shapes.
    """
    stored = _canonical(_headers(folder))
    try:
        _settle_head(stored, config, folder)
    except (SafetensorError, OSError) as error:
        raise _unreadable(folder, error) from None
    shapes = _shapes(config)
    _check(stored, shapes, config, folder)
    return Weights({name: stored[name] for name in shapes}, folder, config, dtype, device)


def _unreadable(folder: Path, error: Exception) -> UserError:
    return UserError(f"{folder}: the weights can't be read ({one_line(error)})")


def _headers(folder: Path) -> list[_Stored]:
    """Every tensor of the folder. A single file wins over shards, as in transformers."""
    if (folder / SINGLE).exists():
        return _header(folder / SINGLE)
    if not (folder / INDEX).exists():
        raise UserError(_no_weights(folder))
    tensors: list[_Stored] = []
    for shard, names in _shards(folder / INDEX).items():
        found = _header(folder / shard)
        _check_shard(folder / shard, set(names), {tensor.name for tensor in found})
        tensors += found
    return tensors


def _header(path: Path) -> list[_Stored]:
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
        "transformers: GPT2LMHeadModel.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER, safe_serialization=True)"
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


def _canonical(tensors: list[_Stored]) -> dict[str, _Stored]:
    """By names without `transformer.`; without the causal mask's buffers."""
    stored: dict[str, _Stored] = {}
    for tensor in tensors:
        name = tensor.name.removeprefix("transformer.")
        if _CAUSAL_MASK.fullmatch(name):
            continue
        if name in stored:
            raise UserError(f"{tensor.path}: {show(name)} is there twice, with and without the prefix transformer.")
        stored[name] = tensor
    return stored


def _settle_head(stored: dict[str, _Stored], config: GPT2Config, folder: Path) -> None:
    """Tied: one matrix, as wte, whichever of the two names it is stored under; if both, they must agree."""
    if not config.tie_word_embeddings or _HEAD not in stored:
        return
    head = stored.pop(_HEAD)
    wte = stored.setdefault(_WTE, head)
    if wte is not head and (wte.dtype != head.dtype or not torch.equal(wte.read(), head.read())):
        raise UserError(
            f"{folder}: {_HEAD} differs from {_WTE}, but the config ties them (tie_word_embeddings); "
            "set tie_word_embeddings: false in config.json if the model has its own head, else remove lm_head.weight"
        )


def _shapes(config: GPT2Config) -> dict[str, tuple[int, ...]]:
    """Canonical name -> canonical shape of every weight that there must be."""
    width, inner = config.n_embd, config.n_inner
    qkv = width + 2 * config.n_kv_head * config.head_dim
    linears = {"attn.c_attn": (qkv, width), "attn.c_proj": (width, width)}
    linears |= {"mlp.c_fc": (inner, width), "mlp.c_proj": (width, inner)}
    shapes: dict[str, tuple[int, ...]] = {_WTE: (config.vocab_size, width), "wpe.weight": (config.max_position, width)}
    for i in range(config.n_layer):
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"h.{i}.{norm}.weight": (width,), f"h.{i}.{norm}.bias": (width,)}
        for linear, shape in linears.items():
            shapes |= {f"h.{i}.{linear}.weight": shape, f"h.{i}.{linear}.bias": shape[:1]}
    shapes |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    if not config.tie_word_embeddings:
        shapes[_HEAD] = (config.vocab_size, width)
    return shapes


def _check(stored: dict[str, _Stored], shapes: dict[str, tuple[int, ...]], config: GPT2Config, folder: Path) -> None:
    """What is there is what must be there, by the files' headers alone."""
    if missing := [f"{name} {list(shape)}" for name, shape in shapes.items() if name not in stored]:
        raise UserError(f"{folder}: the weights lack {_some(missing)}, which config.json asks for")
    if extra := sorted(show(stored[name].name) for name in stored.keys() - shapes.keys()):
        raise UserError(f"{folder}: the weights hold {_some(extra)}, which config.json has no place for")
    wrong = []
    for name, shape in shapes.items():
        tensor, expected = stored[name], list(_as_stored(name, shape, config))
        if tensor.shape != expected:
            wrong.append(f"{tensor.name} has shape {tensor.shape}, expected {expected}")
        elif tensor.dtype not in _FLOATS:
            wrong.append(f"{tensor.name} is {tensor.dtype}, expected one of {', '.join(_FLOATS)}")
    if wrong:
        raise UserError(f"{folder}: the weights do not fit config.json: {_some(wrong)}")


def _as_stored(name: str, shape: tuple[int, ...], config: GPT2Config) -> tuple[int, ...]:
    """By layout, never by shape: a square matrix does not tell which way round it lies."""
    return shape[::-1] if config.layout == "hf" and _LINEAR.fullmatch(name) else shape


def _load(source: _Stored, name: str, config: GPT2Config, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One copy, which turns and casts too. Never the mapping itself: a file cut short later would kill the process."""
    tensor = source.read()
    if config.layout == "hf" and _LINEAR.fullmatch(name):
        tensor = tensor.T
    return torch.empty(tensor.shape, dtype=dtype, device=device).copy_(tensor)


def _some(items: list[str]) -> str:
    return "; ".join(items[:3]) + (f" and {len(items) - 3} more" if len(items) > 3 else "")
