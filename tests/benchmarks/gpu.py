"""The GPU path, checked and then timed: meant for a few minutes on one card.

    python -m tests.benchmarks.gpu [--quick] [--model gpt2-random]

First every kind of pool against `reference` in float32. Then decoding, as a share of the rate at which this card copies
memory (bytes of K/V in reach, read once); prompts, as a share of its rate of bfloat16 products (the products below the
causal mask); each beside `attention=batched`. Last output tokens/s of `w1`, beside transformers' static batches.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

import torch

from ember.attention.base import AttentionMetadata, make_backend
from ember.cache.kv_pool import KVLayer, KVShape
from ember.errors import UserError
from tests.benchmarks.arguments import add_common, repeats, requests_of
from tests.benchmarks.models import model_path
from tests.benchmarks.runs import Bench
from tests.benchmarks.table import Table
from tests.benchmarks.workloads import Request

POOLS = (torch.float32, torch.float16, torch.bfloat16, torch.int8)
CONTEXTS = (1024, 4096, 16_384)
PROMPTS = (2048, 8192)
DECODED_TOKENS = 2**19
"""Tokens of context in a decoding step: far more K/V than any cache holds."""
STATIC_BATCH = 64


@dataclass(frozen=True, slots=True)
class Load:
    """A step of one layer: `sequences` of `context` tokens, the last `new` of them this step's."""

    sequences: int
    context: int
    new: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    block_size: int = 16

    @property
    def kv_numbers(self) -> int:
        """Numbers of K and V in reach of the queries."""
        return 2 * self.sequences * self.context * self.kv_heads * self.dim

    @property
    def flops(self) -> int:
        """Of both products, below the causal mask."""
        pairs = self.new * self.context - self.new * (self.new - 1) // 2
        return 4 * self.sequences * pairs * self.heads * self.dim


class Step:
    """A load's tensors on a device, the pool filled with random K/V, blocks in random order."""

    def __init__(self, load: Load, pool: torch.dtype, dtype: torch.dtype, device: torch.device) -> None:
        self.load, self.pool, self.device = load, pool, device
        generator = torch.Generator(device).manual_seed(0)

        def random(heads: int, tokens: int) -> torch.Tensor:
            return torch.randn(tokens, heads, load.dim, generator=generator, dtype=dtype, device=device)

        blocks = -(-load.context // load.block_size)
        shape = KVShape(n_layer=1, n_kv_head=load.kv_heads, head_dim=load.dim, block_size=load.block_size, dtype=pool)
        self.layer = KVLayer(shape, load.sequences * blocks, device)
        order = torch.randperm(load.sequences * blocks, generator=generator, device=device)
        self.tables = order.int().view(load.sequences, blocks)
        for sequence in range(load.sequences):
            k, v = random(load.kv_heads, load.context), random(load.kv_heads, load.context)
            self.layer.write(k, v, self._slots(sequence, torch.arange(load.context, device=device)))
        tokens = load.sequences * load.new
        self.q, self.k, self.v = (
            random(load.heads, tokens),
            random(load.kv_heads, tokens),
            random(load.kv_heads, tokens),
        )

    def _slots(self, sequence: int, positions: torch.Tensor) -> torch.Tensor:
        size = self.load.block_size
        return self.tables[sequence, positions // size].long() * size + positions % size

    def call(self, attention: str) -> Callable[[], torch.Tensor]:
        """A backend's `forward`, prepared."""
        load, new = self.load, torch.arange(self.load.context - self.load.new, self.load.context, device=self.device)
        backend = make_backend(attention, self.pool)
        backend.prepare(
            AttentionMetadata(
                slot_mapping=torch.cat([self._slots(s, new) for s in range(load.sequences)]),
                query_start_loc=torch.arange(load.sequences + 1, device=self.device).int() * load.new,
                context_lens=torch.full((load.sequences,), load.context, device=self.device).int(),
                block_tables=self.tables,
                block_size=load.block_size,
                max_query_len=load.new,
                max_context_len=load.context,
            )
        )
        return lambda: backend.forward(self.q, self.k, self.v, self.layer, load.dim**-0.5)


def worst_error(load: Load, pool: torch.dtype, dtype: torch.dtype, device: torch.device) -> float:
    """The largest difference between `triton` and `reference`, as a share of the largest output."""
    step = Step(load, pool, dtype, device)
    out = step.call("triton")().float()
    exact = step.call("reference")()
    return float((out - exact.float()).abs().max() / exact.abs().max())


def check(device: torch.device, loads: tuple[Load, ...]) -> None:
    """A row a pool and load.

    Raises:
        UserError: a difference that the dtype does not explain.
    """
    table = Table("pool           ", "queries        ", "sequences", "context", "largest error")
    for pool in POOLS:
        dtype = pool if pool.is_floating_point else torch.bfloat16
        bound = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
        for load in loads:
            error = worst_error(load, pool, dtype, device)
            table.add(_name(pool), _name(dtype), load.sequences, load.context, f"{error:.1e}")
            if not error < bound:
                raise UserError(f"attention=triton is wrong over a {_name(pool)} pool: off by {error:.1e} in {load}")


def seconds_of(call: Callable[[], object], repeat: int) -> float:
    """The median on the device, by its own clock, after three runs that compile and warm up."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeat):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times)


def copy_rate(repeat: int, size: int = 2**30) -> float:
    """Bytes read and written a second."""
    source = torch.zeros(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * size / seconds_of(lambda: target.copy_(source), repeat)


def product_rate(repeat: int, side: int = 8192) -> float:
    """FLOPs a second of a large bfloat16 product."""
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * side**3 / seconds_of(lambda: a @ b, repeat)


def time_attention(repeat: int) -> None:
    """A row a kind of pool, phase and length."""
    copied, multiplied = copy_rate(repeat), product_rate(repeat)
    print(f"copy {copied / 1e9:.0f} GB/s, bfloat16 products {multiplied / 1e12:.0f} TFLOP/s")
    table = Table("phase  ", "pool           ", "sequences", "context", "ms", "of the card", "batched ms")
    device = torch.device("cuda")
    for pool in (torch.bfloat16, torch.int8):
        for context in CONTEXTS:
            load = Load(DECODED_TOKENS // context, context, 1)
            stored = load.kv_numbers * pool.itemsize + (
                0 if pool.is_floating_point else load.kv_numbers // load.dim * 4
            )
            _row(table, "decode", Step(load, pool, torch.bfloat16, device), stored / copied, repeat)
        for context in PROMPTS:
            load = Load(1, context, context)
            _row(table, "prompt", Step(load, pool, torch.bfloat16, device), load.flops / multiplied, repeat)


def _row(table: Table, phase: str, step: Step, least: float, repeat: int) -> None:
    triton, batched = (seconds_of(step.call(name), repeat) for name in ("triton", "batched"))
    load = step.load
    cells = f"{triton * 1e3:.3f}", f"{least / triton:.0%}", f"{batched * 1e3:.3f}"
    table.add(phase, _name(step.pool), load.sequences, load.context, *cells)


def time_jobs(options: argparse.Namespace) -> None:
    """A row a configuration, all in bfloat16 on the same requests; transformers' last."""
    requests = [replace(request, temperature=0.0) for request in requests_of("w1", options)]
    table = Table("engine                      ", "tok/s", "runs")
    for attention, kv_dtype in (("batched", "auto"), ("triton", "auto"), ("triton", "int8")):
        bench = Bench(options.model, device="cuda", dtype="bfloat16", attention=attention, kv_dtype=kv_dtype)
        bench.warm_up(requests)
        rates = [bench.run(requests).rate for _ in range(repeats(options))]
        table.add(f"ember {attention}, K/V {kv_dtype}", f"{median(rates):.0f}", len(rates))
        del bench
        torch.cuda.empty_cache()
    rates = [static_rate(options.model, requests) for _ in range(repeats(options))]
    table.add(f"transformers, batches of {STATIC_BATCH}", f"{median(rates):.0f}", len(rates))


@torch.inference_mode()
def static_rate(model: str, requests: list[Request]) -> float:
    """Output tokens a second of transformers' `generate`: each batch runs to its longest output, like with like."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model_path(model), dtype=torch.bfloat16).to("cuda").eval()
    order = sorted(requests, key=lambda request: request.out)
    batches = [order[at : at + STATIC_BATCH] for at in range(0, len(order), STATIC_BATCH)]
    _generate(network, batches[0], 4)
    torch.cuda.synchronize()
    begin = perf_counter()
    for batch in batches:
        _generate(network, batch, max(request.out for request in batch))
    torch.cuda.synchronize()
    return sum(request.out for request in requests) / (perf_counter() - begin)


def _generate(network: torch.nn.Module, batch: list[Request], most: int) -> None:
    width = max(len(request.prompt) for request in batch)
    ids = torch.tensor([[0] * (width - len(r.prompt)) + r.prompt for r in batch], device="cuda")
    mask = torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in batch], device="cuda")
    length = {"max_new_tokens": most, "min_new_tokens": most}
    network.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **length)  # type: ignore[operator]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main(argv: list[str] | None = None) -> None:
    """Checks, then tables.

    Raises:
        SystemExit: there is no CUDA.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("error: tests.benchmarks.gpu: needs a CUDA GPU, and PyTorch sees none")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    check(torch.device("cuda"), (Load(5, 1300, 1), Load(3, 700, 300), Load(2, 129, 1, heads=6, kv_heads=2, dim=80)))
    time_attention(5 if options.quick else 20)
    time_jobs(options)


if __name__ == "__main__":
    main()
