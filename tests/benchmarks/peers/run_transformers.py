"""transformers' generate: static, padded batches of requests sorted by output length. Options: batch."""

from __future__ import annotations

from typing import Any

from worker import Requests, Run, by_output, serve


def load(options: dict[str, Any]) -> tuple[str, Run]:
    """A model in float32."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, GenerationConfig

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(options["threads"])
    model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.float32).eval()

    def generate(requests: Requests) -> list[list[int]]:
        longest, out = max(len(r["prompt"]) for r in requests), max(r["out"] for r in requests)
        ids = torch.zeros(len(requests), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, r in enumerate(requests):
            ids[row, longest - len(r["prompt"]) :] = torch.tensor(r["prompt"])
            mask[row, longest - len(r["prompt"]) :] = 1
        config = GenerationConfig(max_new_tokens=out, min_new_tokens=out, do_sample=False, pad_token_id=0)
        done = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        return [row[longest : longest + r["out"]].tolist() for row, r in zip(done, requests)]  # noqa: B905

    @torch.inference_mode()
    def run(requests: Requests) -> list[list[int]]:
        tokens: list[list[int]] = [[] for _ in requests]
        for batch in by_output(requests, options["batch"]):
            for i, row in zip(batch, generate([requests[i] for i in batch])):  # noqa: B905
                tokens[i] = row
        return tokens

    return f"transformers {transformers.__version__}", run


if __name__ == "__main__":
    serve(load)
