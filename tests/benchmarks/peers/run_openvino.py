"""OpenVINO GenAI's continuous batching. Options: weights fp32 or int8, kv (f32, u8, default), prefix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from worker import Requests, Run, serve


def convert(model: str, cache: str, weights: str) -> str:
    """The model in OpenVINO's format, made once."""
    target = Path(cache) / f"openvino-{Path(model).name}-{weights}"
    if not (target / "openvino_model.xml").exists():
        from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

        quantization = OVWeightQuantizationConfig(bits=8, sym=False) if weights == "int8" else None
        exported = OVModelForCausalLM.from_pretrained(
            model, export=True, compile=False, load_in_8bit=False, stateful=True, quantization_config=quantization
        )
        exported.save_pretrained(target)
    return str(target)


def load(options: dict[str, Any]) -> tuple[str, Run]:
    """A pipeline with a K/V cache of 4 GiB."""
    folder = convert(options["model"], options["cache"], options["weights"])
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs = 256
    scheduler.max_num_batched_tokens = 256
    scheduler.enable_prefix_caching = options["prefix"]
    scheduler.dynamic_split_fuse = True
    scheduler.cache_size = 4
    properties = {"INFERENCE_NUM_THREADS": options["threads"], "INFERENCE_PRECISION_HINT": "f32"}
    if options["kv"] != "default":
        properties["KV_CACHE_PRECISION"] = options["kv"]
    pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)

    def sampling(out: int) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = out
        config.ignore_eos, config.do_sample, config.apply_chat_template = True, False, False
        return config

    def run(requests: Requests) -> list[list[int]]:
        prompts = [ov.Tensor(np.array([r["prompt"]], dtype=np.int64)) for r in requests]
        return [list(x.m_generation_ids[0]) for x in pipeline.generate(prompts, [sampling(r["out"]) for r in requests])]

    return f"OpenVINO GenAI {genai.__version__}", run


if __name__ == "__main__":
    serve(load)
