"""CTranslate2: static batches of requests sorted by output length. Options: weights (float32, int8), batch.

A call has one output length, so a batch runs to its longest and the rest is cut off.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from worker import Requests, Run, by_output, serve


class IdsAsText:
    """Stands for a tokenizer while converting: a token's text is its id."""

    bos_token, eos_token, unk_token = "<bos>", "<eos>", "<unk>"
    bos_token_id = eos_token_id = unk_token_id = 0
    added_tokens_encoder: dict[str, int] = {}  # noqa: RUF012

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        return self._vocab_size

    def get_vocab(self) -> dict[str, int]:
        """Text to id."""
        return {str(i): i for i in range(self._vocab_size)}


def convert(model: str, cache: str, weights: str) -> str:
    """The model in CTranslate2's format, made once."""
    target = Path(cache) / f"ctranslate2-{Path(model).name}-{weights}"
    if not (target / "model.bin").exists():
        from ctranslate2.converters import TransformersConverter
        from transformers import AutoConfig

        vocab_size = AutoConfig.from_pretrained(model).vocab_size

        class Converter(TransformersConverter):
            def load_tokenizer(self, *_: Any, **__: Any) -> IdsAsText:
                return IdsAsText(vocab_size)

        Converter(model).convert(str(target), quantization=weights, force=True)
    return str(target)


def load(options: dict[str, Any]) -> tuple[str, Run]:
    """A generator with all threads in one batch."""
    folder = convert(options["model"], options["cache"], options["weights"])
    import ctranslate2

    generator = ctranslate2.Generator(
        folder, device="cpu", intra_threads=options["threads"], inter_threads=1, compute_type=options["weights"]
    )

    def run(requests: Requests) -> list[list[int]]:
        tokens: list[list[int]] = [[] for _ in requests]
        for batch in by_output(requests, options["batch"]):
            longest = max(requests[i]["out"] for i in batch)
            done = generator.generate_batch(
                [[str(t) for t in requests[i]["prompt"]] for i in batch],
                max_batch_size=options["batch"],
                max_length=longest,
                min_length=longest,
                sampling_topk=1,
                beam_size=1,
                include_prompt_in_result=False,
                end_token=[],
                return_scores=False,
            )
            for i, result in zip(batch, done):  # noqa: B905
                tokens[i] = result.sequences_ids[0][: requests[i]["out"]]
        return tokens

    return f"CTranslate2 {ctranslate2.__version__}", run


if __name__ == "__main__":
    serve(load)
