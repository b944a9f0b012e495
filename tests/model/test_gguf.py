"""GGUF files, written here with the gguf package: the same network, weights and tokenizer as the folder's."""

from __future__ import annotations

import json
import math
import shutil
import struct
from itertools import pairwise

import numpy as np
import pytest
import torch

from ember import LLM, SamplingParams
from ember.errors import UserError
from ember.model.gguf_file import GgufFile, GgufTensor
from ember.model.gguf_tokenizer import gguf_settings, gguf_tokenizer
from ember.model.library_tokenizer import LibraryTokenizer
from ember.model.network import network_config
from ember.model.presets import TINY
from ember.model.rope import Rope
from ember.model.tokenizer_folder import load_tokenizer
from ember.model.tokenizer_settings import TokenizerSettings
from ember.model.weights import load_weights
from tests.fakes import CPU, ember_logits
from tests.model.test_llama import IDS, LLAMA3, close, random_model, their_logits

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

LLAMA_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def renamed(name):
    """transformers' name of a tensor as llama.cpp has it."""
    if name.startswith("model.layers."):
        _, _, index, rest = name.split(".", 3)
        stem, _, kind = rest.rpartition(".")
        return f"blk.{index}.{LLAMA_NAMES[stem]}.{kind}"
    stem, _, kind = name.rpartition(".")
    return f"{LLAMA_NAMES[stem]}.{kind}"


def in_pairs(rows, heads):
    """As llama.cpp's converter orders rows of q and k: the two that turn together side by side."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_llama(path, model, arch, kind="F32", **extra):
    """A GGUF file of a model of transformers."""
    c = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_eos_token_id(2)
    for key, value in extra.items():
        getattr(writer, key)(*value)
    quantised = gguf.GGMLQuantizationType[kind]
    for name, weight in model.named_parameters():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        numbers = weight.detach().numpy()
        if arch in ("llama", "smollm3") and ("q_proj" in name or "k_proj" in name):
            heads = c.num_attention_heads if "q_proj" in name else c.num_key_value_heads
            numbers = in_pairs(numbers, heads)
        if numbers.ndim == 1 or kind == "F32":
            writer.add_tensor(renamed(name), np.ascontiguousarray(numbers))
        else:
            writer.add_tensor(renamed(name), gguf.quantize(numbers, quantised), raw_dtype=quantised)
    finish(writer)
    return path


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def loaded(path):
    config = network_config(path)
    return config, load_weights(path, config.weight_layout, dtype=torch.float32, device=CPU)


CASES = {
    "llama": ("Llama", "llama", {}, {}),
    "tied": ("Llama", "llama", {"tie_word_embeddings": True}, {}),
    "biases": ("Llama", "llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "linear": (
        "Llama",
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}},
        {"add_rope_scaling_type": (gguf.RopeScalingType.LINEAR,), "add_rope_scaling_factor": (3.0,)},
    ),
    "mistral": ("Mistral", "llama", {"sliding_window": 5}, {"add_sliding_window": (5,)}),
    "qwen2": ("Qwen2", "qwen2", {}, {}),
    "qwen3": ("Qwen3", "qwen3", {}, {}),
    "smollm3": ("SmolLM3", "smollm3", {}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, tmp_path):
    """Queries and keys of Llamas lie in another order in a GGUF file; taken as they lie, the text is nonsense."""
    kind, arch, changes, extra = CASES[case]
    model = random_model(kind, **changes)
    config, weights = loaded(write_llama(tmp_path / "x.gguf", model, arch, **extra))
    assert config.eos_token_ids == (2,)
    close(ember_logits(config, weights, IDS, [30, 11]), their_logits(model)[[29, 40]])


def test_the_frequencies_of_llama_3(tmp_path):
    """They come as a tensor; passed over, all is well up to 8,192 tokens."""
    model = random_model("Llama", rope_parameters=LLAMA3)
    scaled = Rope.from_json({"rope_parameters": LLAMA3}, 1.0, 64).tables(8, 2)[1][1].double().arcsin()
    plain = LLAMA3["rope_theta"] ** (-torch.arange(0, 8, 2).double() / 8)
    path = tmp_path / "x.gguf"
    factors = (plain / scaled).float().numpy()
    extra = {"add_tensor": ("rope_freqs.weight", factors)}
    config, weights = loaded(write_llama(path, model, "llama", **extra))
    assert config.rope.kind == "factors"
    close(ember_logits(config, weights, IDS, [len(IDS)]), their_logits(model)[-1:])


def test_gpt2(tmp_path):
    """The embedded model as a GGUF file makes the same tokens, its tokenizer too."""
    path = write_tiny(tmp_path / "tiny.gguf")
    prompts = ["Call me Ishmael.", "  The\n\nsea 12 é <|endoftext|>"]
    params = SamplingParams(max_tokens=12)
    here = LLM(path, pool_size="1024tok")
    there = LLM(pool_size="1024tok")
    assert [o.token_ids for o in here.generate(prompts, params)] == [
        o.token_ids for o in there.generate(prompts, params)
    ]
    for text in prompts:
        for allow in (False, True):
            theirs = there.plan.tokenizer.encode(text, allow_special_tokens=allow)
            assert here.plan.tokenizer.encode(text, allow_special_tokens=allow) == theirs


def write_tiny(path):
    """The embedded GPT-2 as llama.cpp's converter writes it: linears [out, in]."""
    names = {"ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output"}
    names |= {"ln_2": "ffn_norm", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
    top = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm"}
    config = network_config(TINY)
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.n_inner)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    write_vocabulary(writer, TINY)
    for name, weight in load_weights(TINY, config.weight_layout, dtype=torch.float32, device=CPU).items():
        stem, _, kind = name.rpartition(".")
        if stem.startswith("h."):
            _, index, part = stem.split(".", 2)
            writer.add_tensor(f"blk.{index}.{names[part]}.{kind}", weight.numpy())
        else:
            writer.add_tensor(f"{top[stem]}.{kind}", weight.numpy())
    finish(writer)
    return path


def write_vocabulary(writer, folder):
    vocab = json.loads((folder / "vocab.json").read_text())
    merges = (folder / "merges.txt").read_text().splitlines()
    tokens = sorted(vocab, key=vocab.get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token == "<|endoftext|>" else 1 for token in tokens])
    writer.add_token_merges([merge for merge in merges if merge and not merge.startswith("#")])
    writer.add_eos_token_id(vocab["<|endoftext|>"])
    writer.add_chat_template("{{ messages }}")


KINDS = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS IQ2_XXS IQ3_S TQ1_0"


@pytest.mark.parametrize("kind", KINDS.split())
def test_every_quantisation_is_read_as_the_package_does(kind, tmp_path, monkeypatch):
    """A matrix is read in parts; a part that begins in the wrong place shifts all that follows."""
    from ember.model import gguf_file

    monkeypatch.setattr(gguf_file, "_CHUNK", 3 * 512)
    quantised = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[quantised]
    raw = np.random.default_rng(0).integers(0, 100, (10, 512 // block * size), dtype=np.uint8)
    (tmp_path / "x").write_bytes(b"before" + raw.tobytes())
    tensor = GgufTensor(tmp_path / "x", "w", [2, 5, 512], int(quantised), 6)
    assert tensor.num_bytes == raw.nbytes
    whole = torch.from_numpy(gguf.dequantize(raw, quantised)).view(2, 5, 512)
    torch.testing.assert_close(tensor.read(), whole, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
def test_a_quantised_file_is_near_the_model(kind, tmp_path):
    """Rows that are quantised block by block, through the whole network."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    model = random_model("Llama", **sizes)
    config, weights = loaded(write_llama(tmp_path / "x.gguf", model, "llama", kind))
    theirs = their_logits(model)[-1:]
    ours = ember_logits(config, weights, IDS, [len(IDS)])
    assert (ours - theirs).abs().max() < (0.1 if kind == "Q8_0" else 0.01) * theirs.abs().max()


CUTS = {"gpt-2": None, "smollm": None, "llama-bpe": None, "qwen2": None}


@pytest.mark.parametrize("cut", CUTS)
def test_ways_to_cut_a_text(cut, tmp_path):
    """Each `pre` is a way of its own: digits one by one, by three, all together, words with a mark before."""
    tokenizer = LibraryTokenizer(
        gguf_tokenizer(GgufFile.open(vocabulary_file(tmp_path, cut))), TokenizerSettings(), "x"
    )
    expected = {
        "gpt-2": ["12345"],
        "smollm": ["1", "2", "3", "4", "5"],
        "llama-bpe": ["123", "45"],
        "qwen2": [*"12345"],
    }
    data = gguf_tokenizer(GgufFile.open(tmp_path / "x.gguf"))
    from tokenizers import Tokenizer

    run = Tokenizer.from_str(json.dumps(data))
    assert [text for text, _ in run.pre_tokenizer.pre_tokenize_str("12345")] == expected[cut]
    text = "It's a\n\n tést 日本 <|endoftext|>!"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def vocabulary_file(folder, cut):
    writer = gguf.GGUFWriter(folder / "x.gguf", "llama")
    write_vocabulary(writer, TINY)
    writer.kv_data[0]["tokenizer.ggml.pre"].value = cut
    finish(writer)
    return folder / "x.gguf"


def test_sentence_pieces(tmp_path):
    """Merges are not in the file but follow from the scores; bytes that no piece spells fall back to byte tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.SentencePieceBPETokenizer(fuse_unk=True)
    texts = [(TINY / "README.md").read_text()] * 2
    made.train_from_iterator(texts, vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    vocab = made.get_vocab()
    learnt = sorted(vocab, key=vocab.get)
    tokens = [*learnt[:3], *(f"<0x{byte:02X}>" for byte in range(256)), *learnt[3:]]
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    finish(writer)
    ours = load_tokenizer(tmp_path / "x.gguf")
    for text in ("the model is a small model", "weights  of\nthe tiny", "a"):
        assert [tokens[i] for i in ours.encode(text)] == ["<s>", *expected_pieces(text, learnt[3:])]
    ids = ours.encode("日")
    assert [tokens[i] for i in ids[-3:]] == ["<0xE6>", "<0x97>", "<0xA5>"]
    assert ours.decode(ids) == "日"


def expected_pieces(text, learnt):
    """SentencePiece's BPE, as it is defined: of all neighbours, those that make the best piece go together."""
    rank = {piece: i for i, piece in enumerate(learnt)}
    parts = list("\u2581" + text.replace(" ", "\u2581"))
    while True:
        ways = [(rank[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in rank]
        if not ways:
            return [piece for part in parts for piece in ([part] if part in rank else fallen_back(part))]
        _, i = min(ways)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def fallen_back(char):
    return [f"<0x{byte:02X}>" for byte in char.encode()]


def test_settings(tmp_path):
    """Chat template and names of special tokens come from the file."""
    settings = TokenizerSettings.from_folder(vocabulary_file(tmp_path, "smollm"))
    assert settings.chat_template == "{{ messages }}"
    assert settings.named == {"eos_token": "<|endoftext|>"}
    assert settings.add_bos is False
    assert settings == gguf_settings(GgufFile.open(tmp_path / "x.gguf"))


@pytest.mark.parametrize("where", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_file_cut_short(where, tmp_path):
    """One line, whatever was being read when the file ended; nothing is read beyond it."""
    path = write_tiny(tmp_path / "x.gguf")
    data = path.read_bytes()
    path.write_bytes(data[: math.ceil(len(data) * where)])
    with pytest.raises(UserError, match=r"x\.gguf: not a whole GGUF file|x\.gguf: not a GGUF file") as caught:
        loaded(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"GGUX" + bytes(100), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 is not supported"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0) + bytes(100), "counts more than it holds"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**62) + bytes(100), "counts more than it holds"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 77), "kind 77"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), r"general\.architecture=null: is not supported"),
    ],
)
def test_broken_headers(data, says, tmp_path):
    """A stranger's file must neither end the process nor make it take all memory."""
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(UserError, match=says) as caught:
        loaded(tmp_path / "x.gguf")
    assert "x.gguf" in str(caught.value) and "\n" not in str(caught.value)


def test_refused_by_name(tmp_path):
    """Another architecture, a feature that is not read, a tensor too many, a type that can't be read."""
    model = random_model("Llama")
    for extra, says in [
        ({"add_logit_scale": (2.0,)}, r"llama\.logit_scale"),
        ({"add_rope_scaling_type": (gguf.RopeScalingType.LONGROPE,)}, r'rope\.scaling\.type="longrope"'),
        ({"add_rope_dimension_count": (4,)}, r"rope\.dimension_count=4: is not supported; must be 8"),
        ({"add_tensor": ("blk.0.attn_sinks.weight", np.zeros(4, np.float32))}, r'the weights hold "blk\.0\.attn_sinks'),
    ]:
        with pytest.raises(UserError, match=says):
            loaded(write_llama(tmp_path / "x.gguf", model, "llama", **extra))
    with pytest.raises(UserError, match=r'general\.architecture="qwen2moe": is not supported; must be one of llama'):
        loaded(write_llama(tmp_path / "x.gguf", model, "qwen2moe"))
    path = write_llama(tmp_path / "x.gguf", model, "llama")
    with pytest.raises(UserError, match="ggml's type 99"):
        GgufTensor(path, "w", [4, 32], 99, 0).read()


def test_other_files_are_refused(tmp_path):
    """Any other file as model.path: the line says what may be given."""
    shutil.copy(TINY / "config.json", tmp_path / "x.bin")
    with pytest.raises(UserError, match=r"is a file; give the folder that it lies in, or a \.gguf file"):
        LLM(tmp_path / "x.bin")
    with pytest.raises(UserError, match=r"model\.path=missing\.gguf: no such file"):
        LLM("missing.gguf")
