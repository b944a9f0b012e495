"""Every attention backend against plain float64 matrices, over pools whose unused slots are NaN."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ember.attention import batched, cpu_kernel
from ember.attention.base import AttentionMetadata, make_backend
from ember.attention.choice import resolve_attention
from ember.cache.kv_pool import KVLayer, KVShape
from ember.errors import ConfigError

BACKENDS = ("reference", "batched", "cpu")


@dataclass
class Case:
    """Sequences of (context length before the step, new tokens), their whole q, k, v, and where they lie."""

    lengths: list[tuple[int, int]]
    kv_heads: int
    group: int
    head_dim: int
    block_size: int
    seed: int = 0
    scale: float = 0.3
    window: int | None = None

    def __post_init__(self):
        self.generator = torch.Generator().manual_seed(self.seed)
        self.q = [self._random(old + new, self.kv_heads * self.group) for old, new in self.lengths]
        self.k = [self._random(old + new, self.kv_heads) for old, new in self.lengths]
        self.v = [self._random(old + new, self.kv_heads) for old, new in self.lengths]
        counts = [-(-(old + new) // self.block_size) for old, new in self.lengths]
        self.num_blocks = sum(counts) + 3
        shuffled = torch.randperm(self.num_blocks, generator=self.generator).int()
        self.tables = list(shuffled[: sum(counts)].split(counts))

    def _random(self, *size):
        return torch.randn(*size, self.head_dim, generator=self.generator)

    def slots(self, s, first, last):
        position = torch.arange(first, last)
        return self.tables[s][position // self.block_size].long() * self.block_size + position % self.block_size

    def empty_layer(self, dtype=torch.float32):
        """A pool that is all NaN, padding and scales too."""
        shape = KVShape(
            n_layer=1, n_kv_head=self.kv_heads, head_dim=self.head_dim, block_size=self.block_size, dtype=dtype
        )
        layer = KVLayer(shape, self.num_blocks, torch.device("cpu"))
        for stored in (layer.k, layer.v, layer.k_scale, layer.v_scale):
            stored.fill_(math.nan if stored.is_floating_point() else 99)
        return layer

    def layer(self, dtype=torch.float32):
        """The pool before the step: NaN in every slot that holds no token yet."""
        layer = self.empty_layer(dtype)
        for s, (old, _) in enumerate(self.lengths):
            layer.write(self.k[s][:old], self.v[s][:old], self.slots(s, 0, old))
        return layer

    def metadata(self):
        width = max(map(len, self.tables))
        padded = torch.zeros(len(self.tables), width, dtype=torch.int32)
        for row, table in zip(padded, self.tables, strict=True):
            row[: len(table)] = table
        new = torch.tensor([new for _, new in self.lengths])
        return AttentionMetadata(
            slot_mapping=torch.cat([self.slots(s, old, old + n) for s, (old, n) in enumerate(self.lengths)]),
            query_start_loc=torch.cat([torch.zeros(1), new.cumsum(0)]).int(),
            context_lens=torch.tensor([sum(pair) for pair in self.lengths]).int(),
            block_tables=padded,
            block_size=self.block_size,
            max_query_len=max(new for _, new in self.lengths),
            max_context_len=max(map(sum, self.lengths)),
        )

    def packed(self, whole):
        """The new tokens of all sequences, one after another."""
        return torch.cat([x[old:] for x, (old, _) in zip(whole, self.lengths, strict=True)])

    def run(self, backend, dtype=torch.float32):
        """The backend's output and the pool of that dtype that it leaves."""
        attention, layer = make_backend(backend, dtype), self.layer(dtype)
        attention.prepare(self.metadata())
        out = attention.forward(
            self.packed(self.q), self.packed(self.k), self.packed(self.v), layer, self.scale, self.window
        )
        return out, layer

    def dense(self):
        """softmax(q k^T * scale + mask) v, each head of each sequence as a matrix of its own, in float64."""
        rows = []
        for q, k, v, (old, _) in zip(self.q, self.k, self.v, self.lengths, strict=True):
            heads = []
            for head in range(self.kv_heads * self.group):
                shared = head // self.group
                scores = q[:, head].double() @ k[:, shared].double().T * self.scale
                hidden = torch.ones_like(scores).triu(1).bool()
                if self.window is not None:
                    hidden |= torch.ones_like(scores).tril(-self.window).bool()
                heads.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ v[:, shared].double())
            rows.append(torch.stack(heads, 1)[old:])
        return torch.cat(rows)


def check(case, backend):
    out, layer = case.run(backend)
    assert out.shape == case.packed(case.q).shape
    torch.testing.assert_close(out.double(), case.dense(), atol=2e-5, rtol=1e-4)
    for s, (old, new) in enumerate(case.lengths):
        keys, values = layer.gather(case.slots(s, 0, old + new))
        assert torch.equal(keys, case.k[s])
        assert torch.equal(values, case.v[s])
    written = sum(old + new for old, new in case.lengths) * case.kv_heads
    assert int((~layer.v.isnan()).any(3).sum()) == written, "a slot of nobody was written"
    assert int((~layer.k.isnan()).any(3).sum()) == written, "a slot of nobody was written"


SEQUENCES = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 70), st.just(1)),
        st.tuples(st.integers(0, 40), st.integers(1, 40)),
        st.tuples(st.just(0), st.integers(60, 140)),
    ),
    min_size=1,
    max_size=5,
)

WINDOWS = st.one_of(st.none(), st.integers(1, 9), st.integers(10, 150))


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    lengths=SEQUENCES,
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    head_dim=st.sampled_from([1, 2, 5, 8, 16, 32]),
    block_size=st.sampled_from([1, 2, 3, 7, 16, 33, 64]),
    seed=st.integers(0, 2**31),
    window=WINDOWS,
)
def test_any_batch_matches_plain_matrices(backend, lengths, kv_heads, group, head_dim, block_size, seed, window):
    """A wrong slot, mask, head group or tile, or one NaN read from a slot that is not the sequence's."""
    check(Case(lengths, kv_heads, group, head_dim, block_size, seed, window=window), backend)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(lengths=SEQUENCES, group=st.integers(1, 3), block_size=st.integers(1, 64), seed=st.integers(0, 2**31))
def test_the_backends_agree(lengths, group, block_size, seed):
    """The default backend is held to the reference one: choosing another must change no result."""
    case = Case(lengths, 2, group, 8, block_size, seed)
    reference, *others = (case.run(backend)[0] for backend in BACKENDS)
    for other in others:
        torch.testing.assert_close(other, reference, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_query_heads_share_kv_heads_in_order(backend):
    """Heads 0, 1 read K/V head 0 and heads 2, 3 head 1; interleaved instead, every GQA model would be wrong."""
    case = Case([(0, 1), (3, 2)], kv_heads=2, group=2, head_dim=4, block_size=2)
    for v in case.v:
        v[:, 0], v[:, 1] = 1.0, 2.0
    out, _ = case.run(backend)
    assert torch.allclose(out[:, :2], torch.ones(3, 2, 4))
    assert torch.allclose(out[:, 2:], torch.full((3, 2, 4), 2.0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_sees_itself_and_nothing_later(backend):
    """A mask off by one shows in the first query of a chunk, which sees one token more than the context before."""
    case = Case([(4, 3)], kv_heads=1, group=1, head_dim=1, block_size=3)
    case.q[0].zero_()  # all that is seen weighs the same
    case.v[0][:, 0, 0] = torch.arange(7.0)
    out, _ = case.run(backend)
    assert torch.allclose(out.flatten(), torch.tensor([2.0, 2.5, 3.0]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_scale_is_the_callers(backend):
    """GPT-2 has three ways to scale scores; a backend that scales by itself would be right for one."""
    for scale in (0.0, 1.0, 0.05):
        check(Case([(5, 4), (2, 1)], 2, 2, 8, 4, scale=scale), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_scores_do_not_overflow(backend):
    """softmax must subtract the maximum: exp(200) is infinite in float32."""
    case = Case([(6, 3)], 1, 1, 4, 4, scale=100.0)
    out, _ = case.run(backend)
    assert out.isfinite().all()
    torch.testing.assert_close(out.double(), case.dense(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("tile", [1, 3, 64])
@pytest.mark.parametrize("group_slots", [1, 40, 32_768])
def test_tiles_and_groups_change_nothing(tile, group_slots, monkeypatch):
    """A long prompt is cut into tiles and a large batch into groups; a cut in the wrong place shows here."""
    monkeypatch.setattr(batched, "TILE", tile)
    monkeypatch.setattr(batched, "GROUP_SLOTS", group_slots)
    check(Case([(0, 65), (7, 1), (0, 1), (30, 4), (31, 1), (2, 64), (9, 1)], 2, 2, 4, 5), "batched")


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_backend_object_serves_many_steps(backend):
    """What `prepare` keeps of one step must not leak into the next, whatever its shape."""
    attention = make_backend(backend, torch.float32)
    for seed, lengths in enumerate([[(0, 9), (4, 1)], [(9, 1)], [(1, 1), (2, 70), (3, 1)]]):
        case = Case(lengths, 2, 1, 4, 4, seed)
        attention.prepare(case.metadata())
        q, k, v = (case.packed(x) for x in (case.q, case.k, case.v))
        layers = [case.layer(), case.layer()]
        outs = [attention.forward(q, k, v, layer, case.scale) for layer in layers]
        assert torch.equal(*outs)
        torch.testing.assert_close(outs[0].double(), case.dense(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("backend", ["reference", "batched"])
def test_bfloat16_goes_in_and_comes_out(backend):
    """On a GPU all is bfloat16: the output keeps the dtype, and the sums lose no more than its rounding."""
    case = Case([(0, 6), (3, 1)], 1, 2, 8, 4)
    for stored in (case.q, case.k, case.v):
        stored[:] = [x.bfloat16() for x in stored]
    layer = case.empty_layer(torch.bfloat16)
    layer.write(case.k[1][:3], case.v[1][:3], case.slots(1, 0, 3))
    attention = make_backend(backend, torch.bfloat16)
    attention.prepare(case.metadata())
    out = attention.forward(*(case.packed(x) for x in (case.q, case.k, case.v)), layer, case.scale)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), case.dense(), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8], ids=str)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    lengths=SEQUENCES,
    group=st.integers(1, 5),
    head_dim=st.sampled_from([3, 8, 40, 64, 80]),
    block_size=st.sampled_from([1, 7, 8, 16, 40, 64]),
    seed=st.integers(0, 2**31),
    window=WINDOWS,
)
def test_the_kernel_reads_every_kind_of_pool(dtype, lengths, group, head_dim, block_size, seed, window):
    """A half read as an integer, a scale of the wrong slot, or a rounding that the plain backend does not do."""
    case = Case(lengths, 2, group, head_dim, block_size, seed, window=window)
    out, layer = case.run("cpu", dtype)
    expected, held = case.run("reference", dtype)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-4)
    for mine, its in ((layer.k, held.k), (layer.v, held.v), (layer.k_scale, held.k_scale)):
        assert torch.equal(mine.nan_to_num(-1.0), its.nan_to_num(-1.0))
    assert (out.double() - case.dense()).abs().mean() < 0.05


@pytest.mark.parametrize("window", [1, 5, 63, 64, 100])
@pytest.mark.parametrize("group", [1, 3])
def test_a_window_keeps_every_bit_however_the_prompt_is_cut(window, group):
    """A tile that only a neighbour sees must leave a query as it was, even where values in it are infinite."""
    case = Case([(0, 200)], 2, group, 16, 16, window=window)
    whole, _ = case.run("cpu")
    for old in (1, 13, 64, 150, 199):
        part = Case([(old, 200 - old)], 2, group, 16, 16, window=window)
        part.q, part.k, part.v = case.q, [case.k[0].clone()], [case.v[0].clone()]
        part.v[0][: max(0, old - window + 1)] = math.inf
        assert torch.equal(part.run("cpu")[0], whole[old:])


def test_auto_is_the_fastest_there_is():
    """`attention=auto` must mean the fast one, a name must mean itself, and one that can't run must say so."""
    cpu = torch.device("cpu")
    assert [resolve_attention(name, cpu, torch.float32) for name in ("auto", *BACKENDS)] == ["cpu", *BACKENDS]
    assert resolve_attention("auto", cpu, torch.bfloat16) == "batched"
    assert resolve_attention("auto", torch.device("meta"), torch.float32) == "batched"
    with pytest.raises(ConfigError, match="attention=cpu"):
        resolve_attention("cpu", cpu, torch.float16)


def test_a_thread_that_finds_no_memory_is_an_error(monkeypatch):
    """Compiled threads can't raise: what one of them left out would pass for a result."""
    monkeypatch.setattr(cpu_kernel, "attend", lambda *given: torch.get_num_threads() - 1)
    with pytest.raises(MemoryError, match="attention"):
        Case([(3, 70)], kv_heads=1, group=1, head_dim=8, block_size=4).run("cpu")
