"""load_weights against transformers' own saves, and against files that lie, lack or are broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ember.errors import UserError
from ember.model.gpt2_config import GPT2Config
from ember.model.presets import TINY
from ember.model.weights import load_weights

CPU = torch.device("cpu")
V, P, C, N = 40, 16, 8, 2  # vocabulary, positions, width, layers
LINEARS = {"attn.c_attn": (3 * C, C), "attn.c_proj": (C, C), "mlp.c_fc": (4 * C, C), "mlp.c_proj": (C, 4 * C)}
Weights = dict[str, torch.Tensor]


def canonical(seed: int = 0) -> Weights:
    """Random weights under canonical names, linears `[out, in]`."""
    rng = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (V, C), "wpe.weight": (P, C)}
    for i in range(N):
        for name, shape in LINEARS.items():
            shapes |= {f"h.{i}.{name}.weight": shape, f"h.{i}.{name}.bias": shape[:1]}
        for name in ("ln_1", "ln_2"):
            shapes |= {f"h.{i}.{name}.weight": (C,), f"h.{i}.{name}.bias": (C,)}
    shapes |= {"ln_f.weight": (C,), "ln_f.bias": (C,)}
    return {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}


def stored(weights: Weights) -> Weights:
    """The same as Hugging Face stores it: linears `[in, out]`."""
    return {k: v.T.contiguous() if ".c_" in k and k.endswith("weight") else v.clone() for k, v in weights.items()}


def config(folder: Path, **changes: Any) -> GPT2Config:
    data = {"model_type": "gpt2", "vocab_size": V, "n_positions": P, "n_embd": C, "n_layer": N, "n_head": 2} | changes
    (folder / "config.json").write_text(json.dumps(data))
    return GPT2Config.from_folder(folder)


def load(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Weights:
    return load_weights(folder, config(folder, **changes).weight_layout, dtype=dtype, device=CPU)


def save(folder: Path, tensors: Weights, name: str = "model.safetensors") -> None:
    save_file(tensors, folder / name)


def shard(folder: Path, tensors: Weights, weight_map: dict[str, Any] | None = None) -> None:
    """Two shards and an index, true unless `weight_map` says otherwise."""
    names, files = sorted(tensors), ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    halves = [names[::2], names[1::2]]
    for half, file in zip(halves, files, strict=True):
        save(folder, {name: tensors[name] for name in half}, file)
    truth = {name: file for half, file in zip(halves, files, strict=True) for name in half}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": truth | (weight_map or {})}))


def assert_same(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].is_contiguous(), name


def fails(folder: Path, says: str, **changes: Any) -> str:
    with pytest.raises(UserError, match=says) as caught:
        load(folder, **changes)
    text = str(caught.value)
    assert "\n" not in text and str(folder) in text and len(text) < 700
    return text


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_hugging_face_layout(tmp_path: Path, prefix: str) -> None:
    """Both prefixes occur; a square c_proj that is turned by its shape, not its layout, gives wrong text."""
    save(tmp_path, {prefix + name: tensor for name, tensor in stored(canonical()).items()})
    assert_same(load(tmp_path), canonical())


def test_ember_layout(tmp_path: Path) -> None:
    """ember's export stores `[out, in]`: turning it like Hugging Face's would pass every check on square matrices."""
    save(tmp_path, canonical())
    names = {"name": "x", "n_layer": N, "n_head": 2, "n_kv_head": 2, "n_embd": C, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps({**names, "vocab_size": V, "max_position": P}))
    found = load_weights(tmp_path, GPT2Config.from_folder(tmp_path).weight_layout, dtype=torch.float32, device=CPU)
    assert_same(found, canonical())


def test_causal_mask_buffers_are_ignored_but_not_biases(tmp_path: Path) -> None:
    """The official gpt2 file holds h.N.attn.bias, the mask, beside h.N.attn.c_attn.bias, a weight."""
    buffers = {f"h.{i}.attn.bias": torch.ones(1, 1, P, P, dtype=torch.uint8) for i in range(N)}
    buffers |= {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(N)}
    save(tmp_path, stored(canonical()) | buffers)
    assert_same(load(tmp_path), canonical())


@pytest.mark.parametrize("file_dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(tmp_path: Path, file_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """A cast through a third dtype would lose bits of a weight."""
    expected = {name: tensor.to(file_dtype) for name, tensor in canonical().items()}
    save(tmp_path, stored(expected))
    found = load(tmp_path, dtype)
    assert {tensor.dtype for tensor in found.values()} == {dtype}
    assert_same(found, {name: tensor.to(dtype) for name, tensor in expected.items()})


def test_other_dtypes_are_refused(tmp_path: Path) -> None:
    """int8 weights without their scales would be read as numbers up to 127."""
    save(tmp_path, stored(canonical()) | {"h.0.ln_1.bias": torch.zeros(C, dtype=torch.int8)})
    fails(tmp_path, r"h\.0\.ln_1\.bias is I8, expected one of F64, F32")


def test_fewer_kv_heads(tmp_path: Path) -> None:
    """With shared K/V heads c_attn is narrower than 3C."""
    tensors = stored(canonical())
    for i in range(N):
        name = f"h.{i}.attn.c_attn"
        tensors |= {f"{name}.weight": tensors[f"{name}.weight"][:, : 2 * C].contiguous()}
        tensors |= {f"{name}.bias": tensors[f"{name}.bias"][: 2 * C].clone()}
    save(tmp_path, tensors)
    assert load(tmp_path, n_kv_head=1)["h.1.attn.c_attn.weight"].shape == (2 * C, C)


def test_tied_heads(tmp_path: Path) -> None:
    """A tied head comes as wte alone, lm_head alone, or both alike; all mean the same model."""
    tensors = stored(canonical())
    head = {"lm_head.weight": tensors["wte.weight"].clone()}
    without = {name: tensor for name, tensor in tensors.items() if name != "wte.weight"}
    for both in (tensors | head, without | head):
        save(tmp_path, both)
        assert_same(load(tmp_path), canonical())


def test_tied_config_with_another_head_is_refused(tmp_path: Path) -> None:
    """A trained head that is dropped because the config says tied gives wrong text, silently."""
    save(tmp_path, stored(canonical()) | {"lm_head.weight": torch.zeros(V, C)})
    assert "tie_word_embeddings: false" in fails(tmp_path, "lm_head.weight differs from wte.weight")
    save(tmp_path, stored(canonical()) | {"lm_head.weight": torch.zeros(V + 1, C, dtype=torch.float16)})
    fails(tmp_path, "differs")


def test_untied_head(tmp_path: Path) -> None:
    """With tie_word_embeddings: false both matrices are needed, and wte must not stand in for the head."""
    tensors = canonical() | {"lm_head.weight": torch.ones(V, C)}
    save(tmp_path, stored(tensors))
    assert_same(load(tmp_path, tie_word_embeddings=False), tensors)
    save(tmp_path, stored(canonical()))
    fails(tmp_path, r"lack lm_head\.weight \[40, 8\]", tie_word_embeddings=False)


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    """A KeyError, or torch's page of size mismatches, does not tell what is wrong with the folder."""
    tensors = stored(canonical())
    save(tmp_path, {name: tensor for name, tensor in tensors.items() if name != "h.1.mlp.c_fc.bias"})
    fails(tmp_path, r"lack h\.1\.mlp\.c_fc\.bias \[32\]")
    save(tmp_path, tensors | {"h.0.crossattention.c_attn.weight": torch.zeros(1)})
    fails(tmp_path, r"hold \"h\.0\.crossattention\.c_attn\.weight\"")
    save(tmp_path, tensors | {"h.0.mlp.c_fc.weight": torch.zeros(4 * C, C)})
    fails(tmp_path, r"h\.0\.mlp\.c_fc\.weight has shape \[32, 8\], expected \[8, 32\]")
    save(tmp_path, tensors)
    assert "and 9 more" in fails(tmp_path, r"lack h\.2\.ln_1\.weight", n_layer=3)
    assert "and 25 more" in fails(tmp_path, r"wte\.weight has shape \[40, 8\], expected \[40, 10\]", n_embd=10)


def test_a_tensor_twice(tmp_path: Path) -> None:
    """With and without prefix in one file: which of the two is the model?"""
    save(tmp_path, stored(canonical()) | {"transformer.ln_f.bias": torch.zeros(C)})
    fails(tmp_path, r"ln_f\.bias\" is there twice")


def test_sharded(tmp_path: Path) -> None:
    """Large models come in shards; the index tells which."""
    shard(tmp_path, stored(canonical()))
    assert_same(load(tmp_path), canonical())


def test_single_file_wins_over_shards(tmp_path: Path) -> None:
    """A folder with both must mean what transformers takes: the single file."""
    shard(tmp_path, stored(canonical(seed=1)))
    save(tmp_path, stored(canonical()))
    assert_same(load(tmp_path), canonical())


@pytest.mark.parametrize(
    ("weight_map", "says"),
    [
        ({"wte.weight": "../model.safetensors"}, "no plain"),
        ({"wte.weight": "/etc/passwd"}, "no plain"),
        ({"wte.weight": "a\\b.safetensors"}, "no plain"),
        ({"wte.weight": "..safetensors"}, "no plain"),
        ({"wte.weight": "model.bin"}, "no plain"),
        ({"wte.weight": 3}, "no plain"),
        ({"two\nlines": "model-00001-of-00002.safetensors"}, r"two\\nlines"),
        ({"nothing": "model-00003-of-00003.safetensors"}, "missing"),
        ({"nothing": "model-00001-of-00002.safetensors"}, '"nothing" should be here'),
        ({"wte.weight": "model-00001-of-00002.safetensors"}, 'wte.weight" (should be|is) here'),
        ({"wpe.weight": "model-00001-of-00002.safetensors"}, 'wpe.weight" (should be|is) here'),
    ],
)
def test_index_that_lies(tmp_path: Path, weight_map: dict, says: str) -> None:
    """An untrusted index must not read files outside the folder, nor leave a tensor unloaded."""
    tensors = stored(canonical())
    shard(tmp_path, tensors)
    truth = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    name, file = next(iter(weight_map.items()))
    if truth.get(name) == file:
        weight_map = {name: "model-00002-of-00002.safetensors"}
    shard(tmp_path, tensors, weight_map)
    fails(tmp_path, says)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": [1]}', "[]", "nonsense"])
def test_broken_index(tmp_path: Path, text: str) -> None:
    """An index without a usable weight_map is one line, not a KeyError."""
    (tmp_path / "model.safetensors.index.json").write_text(text)
    fails(tmp_path, r"model\.safetensors\.index\.json")


def test_missing_shard(tmp_path: Path) -> None:
    """An interrupted download leaves the index and some shards."""
    shard(tmp_path, stored(canonical()))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    fails(tmp_path, r"model-00002-of-00002\.safetensors: a shard .* is missing")


def test_pickle_only(tmp_path: Path) -> None:
    """A pickle runs code when read: it is refused, with the way to convert it."""
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert "safe_serialization" in fails(tmp_path, r"only pytorch_model\.bin")
    (tmp_path / "pytorch_model.bin").unlink()
    assert "safe_serialization" in fails(tmp_path, r"no model\.safetensors")


def test_broken_files(tmp_path: Path) -> None:
    """Cut short anywhere, empty, a Git LFS pointer or a folder: one line that names the file."""
    save(tmp_path, stored(canonical()))
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    huge = (2**60).to_bytes(8, "little") + whole[8:]
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    for data in (b"", whole[:4], whole[:100], whole[:-1], whole[: len(whole) // 2], whole + b"x", huge, pointer):
        path.write_bytes(data)
        fails(tmp_path, r"model\.safetensors: not a whole safetensors file")
    path.unlink()
    path.mkdir()
    fails(tmp_path, r"model\.safetensors")


def test_the_file_may_go_once_loaded(tmp_path: Path) -> None:
    """Weights that are still the file's mapping die (SIGBUS) with a job whose model folder is updated in place."""
    save(tmp_path, canonical() | stored(canonical()))
    lazy = load(tmp_path)
    found = dict(lazy)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert_same(found, canonical())
    with pytest.raises(UserError, match="can't be read"):
        lazy["wte.weight"]


def test_tiny() -> None:
    """The embedded model loads, and is what its file says."""
    found = load_weights(TINY, GPT2Config.from_folder(TINY).weight_layout, dtype=torch.float32, device=CPU)
    raw = load_file(TINY / "model.safetensors")
    assert torch.equal(found["h.3.attn.c_proj.weight"], raw["h.3.attn.c_proj.weight"].T.float())
    assert torch.equal(found["wte.weight"], raw["wte.weight"].float())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("max_shard_size", ["5GB", "4KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_transformers_saves(tmp_path: Path, tied: bool, max_shard_size: str, dtype: torch.dtype) -> None:
    """Whatever transformers saves (tied, untied, sharded, half precision) must load as the same numbers."""
    transformers = pytest.importorskip("transformers")
    sizes = transformers.GPT2Config(
        vocab_size=V, n_positions=P, n_embd=C, n_layer=N, n_head=2, tie_word_embeddings=tied, eos_token_id=1
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(sizes).to(dtype)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_size == "4KB")
    found = load_weights(tmp_path, GPT2Config.from_folder(tmp_path).weight_layout, dtype=dtype, device=CPU)
    expected = {name.removeprefix("transformer."): tensor for name, tensor in model.state_dict().items()}
    expected = stored({name: tensor for name, tensor in expected.items() if not (tied and name == "lm_head.weight")})
    assert_same(found, expected)
