"""The K/V tensors: where a slot lies, and how many blocks a pool gets."""

from __future__ import annotations

import pytest
import torch

from ember.cache.kv_pool import FP8, KVPool, KVShape, num_blocks_for
from ember.errors import UserError
from tests.fakes import CPU


def shape(block_size=4, dtype=torch.float32):
    return KVShape(n_layer=2, n_kv_head=3, head_dim=5, block_size=block_size, dtype=dtype)


def count(pool_size, *, block_size=4, max_model_len=16, max_num_seqs=4, free_bytes=10**9, total_bytes=10**10):
    return num_blocks_for(
        pool_size,
        shape(block_size),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        free_bytes=free_bytes,
        total_bytes=total_bytes,
    )


def test_bytes_per_block():
    """K and V, all layers, all heads: a factor forgotten would make `pool_size=2GiB` a lie."""
    assert shape(4).bytes_per_block == 2 * 2 * 3 * 8 * 4 * 4  # head_dim 5 takes up 8
    assert shape(4, torch.float16).bytes_per_block == 2 * 2 * 3 * 8 * 4 * 2
    assert shape(4, torch.int8).bytes_per_block == 2 * 2 * 3 * (8 + 4) * 4  # and a float32 scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, FP8], ids=str)
def test_pool_takes_the_bytes_it_says(dtype):
    """The tensors of a pool must be as big as `bytes_per_block` promises."""
    pool = KVPool(shape(16, dtype), 7, CPU)
    stored = [(layer.k, layer.v, layer.k_scale, layer.v_scale) for layer in pool.layers]
    assert sum(x.nbytes for layer in stored for x in layer) == 7 * shape(16, dtype).bytes_per_block
    assert len(pool.layers) == 2
    assert pool.layers[0].k.shape == (7, 3, 2, 8, 8)
    assert pool.layers[0].v.shape == (7, 3, 16, 8)


@pytest.mark.parametrize("block_size", [1, 3, 8, 24])
def test_a_slot_is_block_times_size_plus_offset(block_size):
    """Writing must land where the kernel reads, and gather must read the same place; K and V must not mix."""
    layer = KVPool(shape(block_size), 6, CPU).layers[1]
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(6 * block_size, generator=generator)[:5]
    k, v = torch.randn(2, 5, 3, 5, generator=generator)
    layer.write(k, v, slots)
    for i, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, block_size)
        group, lane = divmod(offset, layer.shape.lanes)
        assert torch.equal(layer.k[block, :, group, :5, lane], k[i])
        assert torch.equal(layer.v[block, :, offset, :5], v[i])
    keys, values = layer.gather(slots.view(5, 1))
    assert keys.shape == (5, 1, 3, 5)
    assert torch.equal(keys[:, 0], k)
    assert torch.equal(values[:, 0], v)
    assert int(layer.k.count_nonzero()) == k.numel()


@pytest.mark.parametrize("dtype", [torch.int8, FP8], ids=str)
@pytest.mark.parametrize("block_size", [3, 16])
def test_a_scaled_vector_is_kept_within_half_a_step(block_size, dtype):
    """A scale of another head or slot, or a zero vector that becomes not a number."""
    layer = KVPool(shape(block_size, dtype), 2, CPU).layers[0]
    k, v = (
        torch.randn(2, 4, 3, 5, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1e-3, 1, 50, 0])[:, None, None]
    )
    slots = torch.tensor([5, 0, 3, 2])
    layer.write(k, v, slots)
    for stored, x in zip(layer.gather(slots), (k, v), strict=True):
        largest = x.abs().amax(-1, keepdim=True)
        step = largest / 127 if dtype == torch.int8 else torch.maximum(x.abs() / 8, largest / 448 / 512)
        assert bool(((stored - x).abs() <= step * 0.501).all())


def test_layers_do_not_share_slots():
    """A view into the wrong layer would overwrite another layer's K/V."""
    first, second = KVPool(shape(), 2, CPU).layers
    first.write(torch.ones(1, 3, 5), torch.ones(1, 3, 5), torch.tensor([0]))
    assert not second.k.any()
    assert not second.v.any()


@pytest.mark.parametrize(
    ("pool_size", "blocks"),
    [("9", 9), ("16tok", 4), ("19tok", 4), ("20tok", 5), ("6KiB", 4), ("1MiB", 682), ("auto", 16)],
)
def test_pool_sizes(pool_size, blocks):
    """Blocks, tokens and bytes are rounded down to whole blocks; auto is what max_num_seqs full sequences need."""
    assert count(pool_size) == blocks


def test_auto_stays_within_the_free_memory():
    """An auto pool larger than the memory would kill the machine."""
    assert count("auto", free_bytes=10 * shape().bytes_per_block + 1) == 10


@pytest.mark.parametrize(
    ("pool_size", "kwargs"), [("3", {}), ("15tok", {}), ("1KiB", {}), ("auto", {"free_bytes": 1000})]
)
def test_a_pool_that_cannot_hold_one_sequence_is_refused(pool_size, kwargs):
    """Such a pool would let a row wait for ever; the message has both numbers and both remedies on one line."""
    with pytest.raises(UserError) as caught:
        count(pool_size, **kwargs)
    message = str(caught.value)
    for part in ("max_model_len=16", "needs 4 blocks", "pool_size=4", "smaller max_model_len"):
        assert part in message
    assert "\n" not in message


def test_a_partly_filled_last_block_counts_whole():
    """17 tokens need 5 blocks of 4, not 4."""
    assert count("5", max_model_len=17) == 5
    with pytest.raises(UserError):
        count("4", max_model_len=17)


@pytest.mark.parametrize("pool_size", ["100GiB", "99999999999999tok", "9999999999999999999999"])
def test_a_pool_beyond_the_memory_is_one_line(pool_size):
    """The allocator's own traceback, after the model was loaded."""
    with pytest.raises(UserError, match="set a smaller pool_size"):
        count(pool_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, FP8], ids=str)
def test_a_copied_block_is_the_same_in_all_layers(dtype):
    """A copy on write that forgets a layer, the values or the scales of int8."""
    pool = KVPool(shape(8, dtype), 4, CPU)
    for seed, layer in enumerate(pool.layers):
        k, v = torch.randn(2, 32, 3, 5, generator=torch.Generator().manual_seed(seed))
        layer.write(k, v, torch.arange(32))
    before = [[part.clone() for part in layer.gather(torch.arange(32).view(4, 8))] for layer in pool.layers]
    pool.copy_block(2, 0)
    for layer, old in zip(pool.layers, before, strict=True):
        for new, was in zip(layer.gather(torch.arange(32).view(4, 8)), old, strict=True):
            assert torch.equal(new[0], was[2])
            assert torch.equal(new[1:], was[1:])
