"""The network against transformers' GPT-2, which shares no line with it: logits, in every variant that is supported."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ember.model.gpt2_config import GPT2Config
from ember.model.presets import TINY
from ember.model.weights import load_weights
from tests.fakes import CPU, ember_logits

transformers = pytest.importorskip("transformers")

IDS = [(37 * i + i * i) % 61 for i in range(23)]
SMALL = {"vocab_size": 61, "n_positions": 32, "n_embd": 24, "n_layer": 3, "n_head": 4}
VARIANTS = {
    "plain": {},
    "gelu": {"activation_function": "gelu"},
    "relu": {"activation_function": "relu"},
    "narrow_inner": {"n_inner": 40},
    "square_inner": {"n_inner": 24},
    "untied": {"tie_word_embeddings": False},
    "unscaled": {"scale_attn_weights": False},
    "by_layer": {"scale_attn_by_inverse_layer_idx": True},
    "unscaled_by_layer": {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True},
    "epsilon": {"layer_norm_epsilon": 0.1},
    "one_head": {"n_head": 1},
}


def random_model(**changes):
    """A small GPT-2 of transformers; every weight, norms and biases too, is random, so that none can be left out."""
    generator = torch.Generator().manual_seed(0)
    config = transformers.GPT2Config(**{**SMALL, "bos_token_id": 0, "eos_token_id": 0, **changes})
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(noise * 0.4 + ("ln_" in name and name.endswith("weight")))
    return model


def their_logits(model, token_ids=IDS):
    """Logits [T, V] after each token."""
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0]


def saved(model, folder):
    """Ember's config and weights of a model that transformers saved."""
    model.save_pretrained(folder)
    config = GPT2Config.from_folder(folder)
    return config, load_weights(folder, config.weight_layout, dtype=torch.float32, device=CPU)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("attention", ["reference", "batched", "cpu"])
def test_logits_equal_transformers(variant, attention, tmp_path):
    """A forgotten bias, a wrong GELU, a missing scale or a turned matrix moves logits; a whole prompt and steps."""
    model = random_model(**VARIANTS[variant])
    config, weights = saved(model, tmp_path)
    theirs = their_logits(model)
    whole = ember_logits(config, weights, IDS, [len(IDS)], attention=attention)
    close(whole, theirs[-1:])
    close(ember_logits(config, weights, IDS, [1] * len(IDS), attention=attention), theirs)
    close(ember_logits(config, weights, IDS, [9, 1, 1, 12], attention=attention), theirs[[8, 9, 10, 22]])


def test_the_variants_differ():
    """Would all variants give the same logits, the comparisons above would show nothing."""
    logits = [their_logits(random_model(**changes))[-1] for changes in VARIANTS.values()]
    for i, one in enumerate(logits):
        for other in logits[:i]:
            assert (one - other).abs().max() > 1e-3


def test_the_last_position_of_the_context():
    """Position embeddings up to the very last row; off by one fails only there."""
    model = random_model()
    config, weights = hf_weights(model)
    ids = [i % 61 for i in range(32)]
    close(ember_logits(config, weights, ids, [31, 1]), their_logits(model, ids)[30:])


def hf_weights(model):
    """Canonical config and weights of a plain model, without a file: names without prefix, linears turned."""
    c = model.config
    config = GPT2Config(
        vocab_size=c.vocab_size,
        max_position=c.n_positions,
        n_embd=c.n_embd,
        n_layer=c.n_layer,
        n_head=c.n_head,
        n_kv_head=c.n_head,
        n_inner=4 * c.n_embd,
        activation="gelu_new",
        layer_norm_epsilon=1e-5,
        tie_word_embeddings=True,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        layout="hf",
        eos_token_ids=(0,),
        bos_token_id=0,
    )
    linears = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    return config, {
        name: weight.T.contiguous() if name.endswith(linears) else weight
        for name, weight in model.transformer.state_dict().items()
    }


@pytest.mark.parametrize("n_kv_head", [1, 2])
@pytest.mark.parametrize("attention", ["reference", "batched", "cpu"])
def test_grouped_queries_equal_repeated_heads(n_kv_head, attention):
    """GQA is multi-head attention whose K/V heads repeat in groups; shared out in another order, it is not."""
    model = random_model()
    config, weights = hf_weights(model)
    head_dim, group = config.head_dim, config.n_head // n_kv_head
    with torch.no_grad():
        for i, block in enumerate(model.transformer.h):
            for kind in ("weight", "bias"):
                ours = weights[f"h.{i}.attn.c_attn.{kind}"].clone()
                q, k, v = ours.split(config.n_embd)
                k, v = (t.unflatten(0, (-1, head_dim))[::group] for t in (k, v))
                weights[f"h.{i}.attn.c_attn.{kind}"] = torch.cat([q, k.flatten(0, 1), v.flatten(0, 1)])
                repeated = torch.cat([q, *(t.repeat_interleave(group, 0).flatten(0, 1) for t in (k, v))])
                getattr(block.attn.c_attn, kind).copy_(repeated.movedim(0, -1))
    grouped = dataclasses.replace(config, n_kv_head=n_kv_head)
    theirs = their_logits(model)
    close(ember_logits(grouped, weights, IDS, [20, 1, 2], attention=attention), theirs[[19, 20, 22]])


@pytest.mark.parametrize("attention", ["reference", "batched", "cpu"])
def test_the_embedded_model_equals_transformers(attention):
    """The weights that everyone meets first, read from their float16 file."""
    model = transformers.GPT2LMHeadModel.from_pretrained(TINY, dtype=torch.float32).eval()
    config = GPT2Config.from_folder(TINY)
    weights = load_weights(TINY, config.weight_layout, dtype=torch.float32, device=CPU)
    ids = [(i * i * 31 + 7 * i) % 4096 for i in range(70)]
    theirs = their_logits(model, ids)
    chunks = [66, 1, 1, 2]
    close(ember_logits(config, weights, ids, chunks, block_size=16, attention=attention), theirs[[65, 66, 67, 69]])


def test_logits_are_float32_whatever_the_weights():
    """bfloat16 logits would tie and round in the sampler."""
    config, weights = hf_weights(random_model())
    low = {name: weight.bfloat16() for name, weight in weights.items()}
    logits = ember_logits(config, low, IDS, [len(IDS)], dtype=torch.bfloat16)
    assert logits.dtype == torch.float32
    high = ember_logits(config, weights, IDS, [len(IDS)])
    assert (logits - high).abs().max() < 0.1 * high.abs().max()
