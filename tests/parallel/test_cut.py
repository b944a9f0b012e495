"""How weights are shared out among ranks, and which networks can be."""

from __future__ import annotations

import pytest
import torch

from ember.config import JobConfig
from ember.errors import ConfigError
from ember.model.network import network_config
from ember.model.source import TINY
from ember.parallel.cut import Cutter, Joining, Share, check_ranks
from tests.fakes import random_llama

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["tiny", "llama"])
def network(request, tmp_path_factory):
    return network_config(TINY if request.param == "tiny" else random_llama(tmp_path_factory.mktemp("llama")))


def parts_of(network, name, joining):
    weight = torch.arange(torch.Size(shape := network.weight_layout.shapes[name]).numel()).view(shape)
    return weight, [Cutter(Share(rank, 2), network, joining)(name, weight) for rank in range(2)]


@pytest.mark.parametrize("joining", Joining)
def test_every_matrix_is_shared_out_in_halves(network, joining):
    """A layer's name that the table does not know: each rank would hold all of it and compute nonsense."""
    for name, shape in network.weight_layout.shapes.items():
        weight, parts = parts_of(network, name, joining)
        if len(shape) == 2 and name != "wpe.weight":
            assert sum(part.numel() for part in parts) == weight.numel()
            assert torch.equal(torch.cat([part.flatten() for part in parts]).sort().values, weight.flatten())


def test_what_joins_is_cut_by_rows_or_columns():
    """The bias of a sum of parts added once a rank; the two ways mixed up, which the shapes of a square do not show."""
    network, name = network_config(TINY), "h.0.attn.c_proj"
    weight, (first, second) = parts_of(network, f"{name}.weight", Joining.ADD)
    assert torch.equal(torch.cat([first, second], 1), weight)
    bias, parts = parts_of(network, f"{name}.bias", Joining.ADD)
    assert torch.equal(parts[0] + parts[1], bias)
    weight, (first, second) = parts_of(network, f"{name}.weight", Joining.GATHER)
    assert torch.equal(torch.cat([first, second]), weight)


def test_a_vocabulary_of_odd_size():
    """50,257 tokens of which the last belongs to nobody."""
    bounds = [Share(rank, 4).bounds(50_257) for rank in range(4)]
    assert bounds == [(0, 12_564), (12_564, 25_128), (25_128, 37_692), (37_692, 50_257)]


def test_ranks_on_gpus(monkeypatch, tmp_path):
    """More ranks than GPUs, told by CUDA in the middle of loading."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="tensor_parallel_size=2: one GPU a rank, but this process sees 1"):
        check_ranks(2, network_config(random_llama(tmp_path)), torch.device("cuda"))


def test_what_can_not_be_shared_is_refused(tmp_path):
    """A head that two ranks hold halves of; a mistake told by a traceback from the middle of loading."""
    network = network_config(random_llama(tmp_path))
    check_ranks(2, network, CPU)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=4: must divide the model's 2 K/V heads.*use 1, 2$"):
        check_ranks(4, network, CPU)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2: .*not on mps"):
        check_ranks(2, network, torch.device("mps"))
    with pytest.raises(ConfigError, match=r"device=cuda:1: .*use device=cuda"):
        check_ranks(2, network, torch.device("cuda:1"))
    with pytest.raises(ConfigError, match="tensor_parallel_size=0"):
        JobConfig(data="p.jsonl", tensor_parallel_size=0)
    with pytest.raises(ConfigError, match="tensor_parallel_size=2: needs runner=local"):
        JobConfig(data="p.jsonl", tensor_parallel_size=2, runner="ray")
