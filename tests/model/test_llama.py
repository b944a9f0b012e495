"""The network against transformers' Llama and its relatives, which share no line with it: logits, in every variant."""

from __future__ import annotations

import pytest
import torch

from ember.model.network import network_config
from ember.model.weights import load_weights
from tests.fakes import CPU, ember_logits

transformers = pytest.importorskip("transformers")

IDS = [(37 * i + i * i) % 61 for i in range(41)]
SMALL = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 100.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500000.0,
}
VARIANTS = {
    "llama": ("Llama", {}),
    "one_kv_head": ("Llama", {"num_key_value_heads": 1}),
    "all_kv_heads": ("Llama", {"num_key_value_heads": 6}),
    "default_head_dim": ("Llama", {"head_dim": None, "num_attention_heads": 3, "num_key_value_heads": 3}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "attention_bias": ("Llama", {"attention_bias": True}),
    "mlp_bias": ("Llama", {"mlp_bias": True}),
    "epsilon": ("Llama", {"rms_norm_eps": 0.1}),
    "gelu": ("Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "theta": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}),
    "linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "yarn": ("Llama", {"rope_parameters": YARN}),
    "yarn_betas": ("Llama", {"rope_parameters": {**YARN, "beta_fast": 8.0, "beta_slow": 0.5, "truncate": False}}),
    "yarn_factor": ("Llama", {"rope_parameters": {**YARN, "attention_factor": 1.5}}),
    "yarn_mscale": ("Llama", {"rope_parameters": {**YARN, "mscale": 0.9, "mscale_all_dim": 0.4}}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "mistral_one": ("Mistral", {"sliding_window": 1}),
    "mistral_full": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {}),
    "qwen3_bias": ("Qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "smollm3_list": ("SmolLM3", {"no_rope_layers": [0, 1, 0], "attention_bias": True, "mlp_bias": True}),
    "smollm3_window": ("SmolLM3", {"no_rope_layers": [0, 1, 1], "use_sliding_window": True, "sliding_window": 7}),
    "gemma": ("Gemma", {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}),
}


def random_model(kind, **changes):
    """A small model of transformers; every weight, norms and biases too, is random, so that none can be left out."""
    generator = torch.Generator().manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **changes}, attn_implementation="eager")
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(noise * 0.3 + ("norm" in name))
    return model


def their_logits(model, token_ids=IDS):
    """Logits [T, V] after each token."""
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0]


def saved(model, folder, **options):
    """Ember's config and weights of a model that transformers saved."""
    model.save_pretrained(folder, **options)
    config = network_config(folder)
    return config, load_weights(folder, config.weight_layout, dtype=torch.float32, device=CPU)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant, tmp_path):
    """A forgotten bias, a wrong pair of turned numbers, window or norm moves logits; a whole prompt and steps."""
    kind, changes = VARIANTS[variant]
    model = random_model(kind, **changes)
    config, weights = saved(model, tmp_path)
    theirs = their_logits(model)
    for attention in ("reference", "batched", "cpu"):
        close(ember_logits(config, weights, IDS, [len(IDS)], attention=attention), theirs[-1:])
        close(ember_logits(config, weights, IDS, [9, 1, 1, 30], attention=attention), theirs[[8, 9, 10, 40]])
    close(ember_logits(config, weights, IDS, [1] * len(IDS), attention="cpu"), theirs)


def test_the_variants_differ():
    """Would two variants give the same logits, the comparisons above would show nothing."""
    logits = {name: their_logits(random_model(kind, **changes))[-1] for name, (kind, changes) in VARIANTS.items()}
    same = {"mistral_full", "smollm3_window"}  # Llama itself; without weights that show where its windows are
    names = [name for name in logits if name not in same]
    for i, one in enumerate(names):
        for other in names[:i]:
            assert (logits[one] - logits[other]).abs().max() > 1e-3, (one, other)


LONG = 2**17
LONG_KINDS = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 8192},
    "yarn": {**YARN, "original_max_position_embeddings": LONG // 4},
}


@pytest.mark.parametrize("kind", LONG_KINDS)
def test_angles_of_long_positions_equal_transformers(kind, tmp_path):
    """Angles in another precision than the model was trained with are off by hundredths at position 100,000."""
    model = random_model("Llama", rope_parameters=LONG_KINDS[kind], max_position_embeddings=LONG)
    config, _ = saved(model, tmp_path)
    positions = torch.tensor([0, 1, 8191, 65_537, 100_003, LONG - 1])
    cos, sin = model.model.rotary_emb(torch.zeros(1), positions[None])
    ours = config.rope.tables(config.head_dim, LONG)
    for mine, theirs in zip(ours, (cos, sin), strict=True):
        torch.testing.assert_close(mine[positions], theirs[0, :, : config.head_dim // 2], atol=1e-6, rtol=0)


@pytest.mark.parametrize("changes", [{}, {"rope_parameters": LLAMA3}, {"rope_parameters": YARN}], ids=["", "3", "yarn"])
def test_a_long_prompt_and_a_step(changes, tmp_path):
    """Over many tiles and blocks, far beyond the original context."""
    ids = [(37 * i + i * i) % 61 for i in range(1200)]
    model = random_model("Llama", max_position_embeddings=2048, **changes)
    config, weights = saved(model, tmp_path)
    ours = ember_logits(config, weights, ids, [700, 499, 1], block_size=16, attention="cpu")
    close(ours, their_logits(model, ids)[[699, 1198, 1199]])


def test_dynamic_scaling_equals_transformers_token_by_token(tmp_path):
    """Beyond the original context a token's base follows its position, whatever chunk or batch it comes in."""
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = random_model("Llama", rope_parameters=dynamic, max_position_embeddings=16)
    config, weights = saved(model, tmp_path)
    assert config.max_position == 64
    theirs, cache = [], None
    with torch.no_grad():
        for token in IDS:
            out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache, theirs = out.past_key_values, [*theirs, out.logits[0, -1]]
    for chunks in ([len(IDS)], [16, 1, 24], [1] * len(IDS)):
        ends = torch.tensor(chunks).cumsum(0) - 1
        close(ember_logits(config, weights, IDS, chunks, attention="cpu"), torch.stack(theirs)[ends])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_sources_and_shards(dtype, tmp_path):
    """Files of 16 bits, in several shards, are the same weights in float32."""
    config, weights = saved(random_model("Qwen3").to(dtype), tmp_path, max_shard_size="20KB")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    close(ember_logits(config, weights, IDS, [len(IDS)]), their_logits(model)[-1:])


def test_bfloat16_throughout():
    """The plain operations: float32 where transformers has it so, and no more off than the rounding."""
    from ember.model.llama_config import LlamaConfig

    model = random_model("Qwen3")
    config = LlamaConfig.from_json(model.config.to_dict() | {"dtype": "float32"}, {})
    weights = {name.removeprefix("model."): weight for name, weight in model.state_dict().items()}
    low = {name: weight.bfloat16() for name, weight in weights.items()}
    logits = ember_logits(config, low, IDS, [len(IDS)], dtype=torch.bfloat16, attention="batched")
    assert logits.dtype == torch.float32
    theirs = their_logits(model)[-1:]
    assert (logits - theirs).abs().max() < 0.1 * theirs.abs().max()
