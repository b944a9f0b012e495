"""A step on a device whose tensors have no numbers (PyTorch's meta device): whoever asks for one fails."""

from __future__ import annotations

from array import array
from importlib.util import find_spec

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ember import transfer
from ember.attention import triton as backend
from ember.attention.base import AttentionMetadata
from ember.cache.kv_pool import KVPool, KVShape
from ember.core import sampler as sampler_module
from ember.core.batch import ScheduledSequence
from ember.core.decode_graphs import DecodeGraphs
from ember.core.model_runner import ModelRunner
from ember.core.sampler import Sampler
from tests.fakes import VOCAB, make_sequence

DEVICE = torch.device("meta")
SETTINGS = {
    "greedy": [{}],
    "drawn": [{"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.01}, {}, {"temperature": 1.0}],
    "adjusted": [
        {"repetition_penalty": 1.2, "frequency_penalty": 0.1, "min_tokens": 3, "stop_token_ids": [4]},
        {"allowed_token_ids": [1, 2, 3], "logit_bias": {2: 1.0}, "temperature": 0.5},
    ],
}


class Copies(TorchDispatchMode):
    """Counts what takes tensors from the host to the device."""

    def __init__(self):
        super().__init__()
        self.to_device = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = [x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.ndim]
        self.to_device += "cpu" in given and getattr(out, "device", DEVICE) == DEVICE
        return out


class Attention:
    """Leaves out attention."""

    def prepare(self, metadata: AttentionMetadata) -> None:
        pass

    def forward(self, q, k, v, layer, scale, window=None):
        return q


class Network:
    """An embedding, a layer of attention, a head."""

    def __init__(self):
        self.matrix = torch.empty(VOCAB, 16, device=DEVICE)

    def forward(self, input_ids, positions, layers, attention):
        x = self.matrix[input_ids] + self.matrix[positions]
        q = x.view(-1, 2, 8)
        return attention.forward(q, q, q, layers[0], 1.0).reshape(-1, 16)

    def logits(self, hidden, best_only):
        return hidden @ self.matrix.T


@pytest.fixture
def device_step(monkeypatch):
    """Runs a step on the device; all copies to it must be those that nobody waits for. Gives the reads of tokens."""
    reads, sent, tensor = [], [], torch.tensor

    def on_the_host(*args, **kwargs):
        assert "device" not in kwargs, "a copy that the host waits for"
        return tensor(*args, **kwargs)

    def read(numbers):
        reads.append(numbers)
        return [[0.0] * numbers.shape[1]] * 2

    def send(packed, device, **kwargs):
        sent.append(packed)
        return packed.to(device)

    monkeypatch.setattr(sampler_module, "_read", read)
    monkeypatch.setattr(transfer, "_send", send)
    monkeypatch.setattr(torch, "tensor", on_the_host)

    def run(settings, attention, graphs=None):
        sequences = [make_sequence(i, 5, **params) for i, params in enumerate(settings)]
        start = 0 if graphs is None else 4
        tables = [array("i", [2 * i, 2 * i + 1]) for i in range(len(sequences))]
        shares = zip(sequences, tables, strict=True)
        plan = [ScheduledSequence(s, start, 5 - start, table, True, 1) for s, table in shares]
        with Copies() as copies:
            shape = KVShape(n_layer=1, n_kv_head=2, head_dim=8, block_size=4, dtype=torch.float32)
            runner = ModelRunner(Network(), KVPool(shape, 8, DEVICE), attention, DEVICE, graphs)
            logits = runner.execute(plan)
            assert len(sent) == 1, "the packed batch is one copy"
            Sampler().sample(logits, sequences)
        assert copies.to_device == len(sent)
        return reads

    return run


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_step_waits_for_its_tokens_alone(device_step, settings):
    """A number asked of the device, a mask turned into indices, a list as an index: each stops the host."""
    assert len(device_step(settings, Attention())) == 1


@pytest.mark.triton
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton: pip install '.[triton]'")
def test_the_triton_backend_asks_its_device_nothing(device_step, monkeypatch):
    """Tiles that the host cut from the metadata had to be fetched first."""
    launches = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: launches.append(grid)

    for name in ("_attend", "_store", "_join"):
        monkeypatch.setattr(backend, name, Kernel())
    monkeypatch.setattr(backend, "_compiled", lambda: False)
    device_step(SETTINGS["drawn"], backend.TritonAttention(torch.float32))
    assert len(launches) == 3
    assert all(isinstance(n, int) for grid in launches for n in grid)


def test_a_step_from_a_graph_asks_its_device_nothing(device_step):
    """What is copied into a graph's tensors comes from the device's own, in the one copy that every step has."""
    graphs = DecodeGraphs(lambda work: work, most=8, width=2)
    assert len(device_step(SETTINGS["drawn"], Attention(), graphs)) == 1
    assert [size for size, _ in graphs._replays] == [4]
