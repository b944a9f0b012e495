"""Loading needs memory for the weights once, whatever the file's dtype and number of files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ember.model.network import network_config
from ember.model.presets import TINY

LAYERS, WIDTH, VOCAB, CONTEXT = 2, 512, 50257, 64
MEASURE = """
import sys
from ember import LLM, SamplingParams
def mib(key):
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith(key))
def run(model):
    llm = LLM(model, device="cpu", dtype="float32", pool_size="512tok")
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    return llm
run(None)
open("/proc/self/clear_refs", "w").write("5")  # the peak so far is forgotten
before = mib("VmRSS")
llm = run(sys.argv[1])
print(mib("VmHWM") - before)
"""


def tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A GPT-2 whose token embedding is most of it, as in the smallest real one."""
    shapes = {"wte.weight": (VOCAB, WIDTH), "wpe.weight": (CONTEXT, WIDTH)}
    shapes |= {"ln_f.weight": (WIDTH,), "ln_f.bias": (WIDTH,)}
    for i in range(LAYERS):
        linears = {"attn.c_attn": (1, 3), "attn.c_proj": (1, 1), "mlp.c_fc": (1, 4), "mlp.c_proj": (4, 1)}
        for name, (rows, columns) in linears.items():
            shapes[f"h.{i}.{name}.weight"] = (rows * WIDTH, columns * WIDTH)
            shapes[f"h.{i}.{name}.bias"] = (columns * WIDTH,)
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"h.{i}.{norm}.weight": (WIDTH,), f"h.{i}.{norm}.bias": (WIDTH,)}
    return {name: torch.full(shape, 0.01, dtype=dtype) for name, shape in shapes.items()}


def save(folder: Path, weights: dict[str, torch.Tensor], num_files: int) -> None:
    sizes = {"vocab_size": VOCAB, "n_positions": CONTEXT, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 8}
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "eos_token_id": 50256, **sizes}))
    if num_files == 1:
        save_file(weights, folder / "model.safetensors")
        return
    names = sorted(weights)
    files = {f"part-{k}.safetensors": names[k::num_files] for k in range(num_files)}
    for file, own in files.items():
        save_file({name: weights[name] for name in own}, folder / file)
    index = {name: file for file, own in files.items() for name in own}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize(("dtype", "num_files"), [(torch.float32, 1), (torch.float16, 1), (torch.float32, 3)])
def test_loading_holds_no_weight_for_long_twice(dtype, num_files, tmp_path):
    """All tensors read before the first is packed, or an embedding beside the head: the peak would be over 2 and 1.8.

    While the embedding is packed it is there twice, and then the head in 8 bits too (see `ScreenedHead`): that is the
    peak here, and none where more follows it.
    """
    weights = tensors(dtype)
    save(tmp_path, weights, num_files)
    whole = sum(weight.numel() for weight in weights.values()) * 4 / 2**20
    embedding = weights["wte.weight"].numel() * 4 / 2**20
    done = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < max(whole + embedding / 4, 2.25 * embedding) + 0.4 * whole


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_llamas_joined_weights_leave_no_holes(tmp_path):
    """Queries, keys and values are joined before they are packed; what was freed then lay lost in between."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
    config = {"model_type": "llama", "vocab_size": 4096, "max_position_embeddings": 64, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps({**config, **sizes}))
    rng = torch.Generator().manual_seed(0)
    shapes = network_config(tmp_path).weight_layout.shapes
    weights = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    save_file(weights, tmp_path / "model.safetensors")
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(TINY / name, tmp_path)
    whole = sum(weight.numel() for weight in weights.values()) * 4 / 2**20
    done = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.5 * whole
