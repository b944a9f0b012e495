"""vLLM on the CPU, float32, compiled. Options: max_num_seqs, prefix."""

from __future__ import annotations

import os
from typing import Any

from worker import Requests, Run, serve

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def load(options: dict[str, Any]) -> tuple[str, Run]:
    """An LLM in this process, without a tokenizer."""
    import torch
    import vllm

    llm = vllm.LLM(
        model=options["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=options["max_num_seqs"],
        enable_prefix_caching=options["prefix"],
        seed=0,
    )

    def sampling(out: int) -> Any:
        return vllm.SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True, detokenize=False)

    def run(requests: Requests) -> list[list[int]]:
        if options["prefix"]:
            llm.reset_prefix_cache()
        prompts = [{"prompt_token_ids": r["prompt"]} for r in requests]
        done = llm.generate(prompts, [sampling(r["out"]) for r in requests], use_tqdm=False)
        return [list(x.outputs[0].token_ids) for x in done]

    return f"vLLM {vllm.__version__}, {torch.get_num_threads()} threads", run


if __name__ == "__main__":
    serve(load)
