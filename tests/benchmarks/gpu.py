"""The GPU path, checked and then timed: meant for a few minutes on one card.

    python -m tests.benchmarks.gpu [--quick] [--model gpt2-random] [--smoke]

First every kind of pool against `reference` in float32. Then decoding, as a share of the rate at which this card copies
memory (bytes of K/V in reach, read once); prompts, as a share of its rate of bfloat16 products (the products below the
causal mask); each beside `attention=batched`. Last output tokens/s of `w1` with each model (GPT-2 124M and the shape of
a Llama of 1.2 billion weights, if none is named) and each kind of pool, with how many tokens of K/V a GiB holds, beside
transformers' static batches and its continuous batching. `--smoke` runs all of it, tiny, on a CPU in Triton's
interpreter: what it prints says nothing but that the script works.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

import torch

from ember.attention.base import AttentionMetadata, make_backend
from ember.cache.kv_pool import FP8, LARGEST, KVLayer, KVShape
from ember.errors import UserError
from tests.benchmarks.arguments import add_common, repeats, requests_of
from tests.benchmarks.models import RANDOM_GPT2, RANDOM_LLAMA_1B, model_path
from tests.benchmarks.runs import Bench
from tests.benchmarks.table import Table
from tests.benchmarks.workloads import Request

POOLS = (torch.float32, torch.float16, torch.bfloat16, torch.int8, FP8)
BOUNDS = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Of the largest error, by the queries' dtype; those of a pool with scales are bfloat16."""
CONFIGURATIONS = (
    {"attention": "batched"},
    {"attention": "triton"},
    {"attention": "triton", "cuda_graphs": "false"},
    {"attention": "triton", "kv_dtype": "int8"},
    {"attention": "triton", "kv_dtype": "fp8"},
    {"attention": "torch_varlen", "block_size": 256},
)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How much is done, and where."""

    device: torch.device
    dtype: torch.dtype
    checks: tuple[Load, ...]
    shape: Load
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    decoded_tokens: int
    copied_bytes: int
    side: int
    models: tuple[str, ...]
    configurations: tuple[dict[str, Any], ...] = CONFIGURATIONS


GPU = Scale(
    device=torch.device("cuda"),
    dtype=torch.bfloat16,
    checks=(Load(5, 1300, 1), Load(3, 700, 300), Load(2, 129, 1, heads=6, kv_heads=2, dim=80)),
    shape=Load(1, 1, 1),
    contexts=(1024, 4096, 16_384),
    prompts=(2048, 8192),
    decoded_tokens=2**19,  # far more K/V than any cache holds
    copied_bytes=2**30,
    side=8192,
    models=(RANDOM_GPT2, RANDOM_LLAMA_1B),
)
SMOKE = Scale(
    device=torch.device("cpu"),
    dtype=torch.float32,
    checks=(Load(2, 20, 1, 4, 2, 16), Load(1, 20, 7, 2, 1, 16)),
    shape=Load(1, 1, 1, 4, 2, 16),
    contexts=(32,),
    prompts=(16,),
    decoded_tokens=64,
    copied_bytes=2**12,
    side=16,
    models=("tiny",),
    configurations=CONFIGURATIONS[:2],
)


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
        dtype = torch.bfloat16 if pool in LARGEST else pool
        for load in loads:
            error = worst_error(load, pool, dtype, device)
            table.add(_name(pool), _name(dtype), load.sequences, load.context, f"{error:.1e}")
            if not error < BOUNDS[dtype]:
                raise UserError(f"attention=triton is wrong over a {_name(pool)} pool: off by {error:.1e} in {load}")


def seconds_of(call: Callable[[], object], repeat: int, device: torch.device) -> float:
    """The median, by a GPU's own clock, after three runs there that compile and warm up."""
    for _ in range(3 if device.type == "cuda" else 0):
        call()
    times = []
    for _ in range(repeat):
        with _timed(device, times):
            call()
    return median(times)


@contextmanager
def _timed(device: torch.device, times: list[float]) -> Iterator[None]:
    """Append the seconds that the block's work took."""
    if device.type != "cuda":
        started = perf_counter()
        yield
        times.append(perf_counter() - started)
        return
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    yield
    end.record()
    torch.cuda.synchronize()
    times.append(begin.elapsed_time(end) / 1e3)


def copy_rate(scale: Scale, repeat: int) -> float:
    """Bytes read and written a second."""
    source = torch.zeros(scale.copied_bytes, dtype=torch.uint8, device=scale.device)
    target = torch.empty_like(source)
    return 2 * scale.copied_bytes / seconds_of(lambda: target.copy_(source), repeat, scale.device)


def product_rate(scale: Scale, repeat: int) -> float:
    """FLOPs a second of a large product."""
    a, b = (torch.randn(scale.side, scale.side, dtype=scale.dtype, device=scale.device) for _ in range(2))
    return 2 * scale.side**3 / seconds_of(lambda: a @ b, repeat, scale.device)


def time_attention(scale: Scale, repeat: int) -> None:
    """A row a kind of pool, phase and length."""
    copied, multiplied = copy_rate(scale, repeat), product_rate(scale, repeat)
    print(f"copy {copied / 1e9:.0f} GB/s, {_name(scale.dtype)} products {multiplied / 1e12:.0f} TFLOP/s")
    table = Table("phase  ", "pool           ", "sequences", "context", "ms", "of the card", "batched ms")
    for pool in (scale.dtype, torch.int8, FP8):
        for context in scale.contexts:
            load = replace(scale.shape, sequences=scale.decoded_tokens // context, context=context)
            stored = load.kv_numbers * pool.itemsize + (load.kv_numbers // load.dim * 4 if pool in LARGEST else 0)
            _row(table, "decode", Step(load, pool, scale.dtype, scale.device), stored / copied, repeat)
        for context in scale.prompts:
            load = replace(scale.shape, context=context, new=context)
            _row(table, "prompt", Step(load, pool, scale.dtype, scale.device), load.flops / multiplied, repeat)


def _row(table: Table, phase: str, step: Step, least: float, repeat: int) -> None:
    triton, batched = (seconds_of(step.call(name), repeat, step.device) for name in ("triton", "batched"))
    load = step.load
    cells = f"{triton * 1e3:.3f}", f"{least / triton:.0%}", f"{batched * 1e3:.3f}"
    table.add(phase, _name(step.pool), load.sequences, load.context, *cells)


def time_jobs(scale: Scale, model: str, options: argparse.Namespace) -> None:
    """A row a configuration, all of one dtype on the same requests; transformers' last."""
    requests = [replace(request, temperature=0.0) for request in requests_of("w1", options)]
    if options.smoke:
        requests = [Request(request.prompt[:3], 2) for request in requests[:1]]
    print(f"{model}, {len(requests)} requests")
    table = Table("engine                            ", "tok/s", "runs", "K/V tokens a GiB")
    name, repeat = _name(scale.dtype), repeats(options)
    for settings in scale.configurations:
        bench = Bench(model, device=scale.device.type, dtype=name, **settings)
        if not options.smoke:
            bench.warm_up(requests)
        rates = [bench.run(requests).rate for _ in range(repeat)]
        shape = bench.llm.plan.kv_shape
        held = 2**30 // shape.bytes_per_block * shape.block_size
        named = ", ".join("no graphs" if key == "cuda_graphs" else str(value) for key, value in settings.items())
        table.add(f"ember {named}", f"{median(rates):.0f}", repeat, f"{held:,}")
        del bench
        gc.collect()  # the next one takes what memory there is
        torch.cuda.empty_cache()
    network = network_of_transformers(model, scale)
    peers = {f"transformers, batches of {STATIC_BATCH}": static_rate, "transformers, continuous": continuous_rate}
    for label, rate in peers.items():
        if options.smoke and rate is continuous_rate:
            table.add(label, "skipped: it wants a GPU")
            continue
        rates = [rate(network, requests) for _ in range(repeat)]
        table.add(label, f"{median(rates):.0f}", repeat)


def network_of_transformers(model: str, scale: Scale) -> Any:
    """The same weights in transformers' own network."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_path(model), dtype=scale.dtype).to(scale.device).eval()


@torch.inference_mode()
def static_rate(network: Any, requests: list[Request]) -> float:
    """Output tokens a second of transformers' `generate`: each batch runs to its longest output, like with like."""
    order = sorted(requests, key=lambda request: request.out)
    batches = [order[at : at + STATIC_BATCH] for at in range(0, len(order), STATIC_BATCH)]
    _generate(network, batches[0], 4)
    begin = perf_counter()
    for batch in batches:
        _generate(network, batch, max(request.out for request in batch))
    return sum(request.out for request in requests) / (perf_counter() - begin)


def continuous_rate(network: Any, requests: list[Request]) -> float:
    """As above, of transformers' continuous batching, where each request has its own length.

    Raises:
        UserError: it gave up.
    """
    from transformers import GenerationConfig

    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1)
    with network.continuous_batching_context_manager(generation_config=config) as manager:
        for request in requests[:8]:
            manager.add_request(request.prompt, max_new_tokens=2, eos_token_id=-1)
        _await(manager, len(requests[:8]))
        begin = perf_counter()
        for request in requests:
            manager.add_request(request.prompt, max_new_tokens=request.out, eos_token_id=-1)
        _await(manager, len(requests))
        return sum(request.out for request in requests) / (perf_counter() - begin)


def _await(manager: Any, finished: int) -> None:
    while finished:
        result = manager.get_result(timeout=120)
        if result is None or result.error:
            raise UserError(f"transformers' continuous batching gave up: {result and result.error}")
        finished -= result.is_finished()


def _generate(network: Any, batch: list[Request], most: int) -> None:
    width = max(len(request.prompt) for request in batch)
    ids = torch.tensor([[0] * (width - len(r.prompt)) + r.prompt for r in batch], device=network.device)
    mask = torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in batch], device=network.device)
    length = {"max_new_tokens": most, "min_new_tokens": most}
    network.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **length).cpu()


def _name(dtype: torch.dtype) -> str:
    return "fp8" if dtype == FP8 else str(dtype).removeprefix("torch.")


def main(argv: list[str] | None = None) -> None:
    """Checks, then tables.

    Raises:
        SystemExit: there is no CUDA.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser)
    parser.add_argument("--smoke", action="store_true", help="all of it, tiny, on a CPU in Triton's interpreter")
    parser.set_defaults(model=None)
    options = parser.parse_args(argv)
    scale = SMOKE if options.smoke else GPU
    if options.smoke:
        print("a smoke test on a CPU: the figures mean nothing")
    elif torch.cuda.is_available():
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    else:
        raise SystemExit("error: tests.benchmarks.gpu: needs a CUDA GPU, and PyTorch sees none")
    check(scale.device, scale.checks)
    time_attention(scale, 1 if options.smoke else 5 if options.quick else 20)
    for model in scale.models if options.model is None else (options.model,):
        options.model = model
        time_jobs(scale, model, options)


if __name__ == "__main__":
    main()
