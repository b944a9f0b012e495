"""Small tokenizers of the kinds that chat models bring, and a model folder with a chat template, made on the spot."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

from ember.model.presets import TINY

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = (
    "{% for m in messages %}<|endoftext|>{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|endoftext|>assistant:{% endif %}"
)
KINDS = ("byte_level", "llama2", "metaspace")
SPECIAL = {"byte_level": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]}
SENTENCE_PIECE = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


@cache
def tokenizer_json(kind: str) -> str:
    """The tokenizer.json of one kind, trained on the humaneval prompts: the real pipelines in small."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    run = Tokenizer(models.BPE(unk_token=None if kind == "byte_level" else "<unk>", fuse_unk=True))
    alphabet: list[str] = []
    if kind == "byte_level":  # SmolLM2's digits, Qwen's NFC
        run.normalizer = normalizers.NFC()
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        run.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        run.decoder, alphabet = decoders.ByteLevel(), pre_tokenizers.ByteLevel.alphabet()
    elif kind == "llama2":
        run.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        run.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, limit_alphabet=256 if alphabet else 80, show_progress=False
    )
    prompts = (Path(__file__).parent.parent / "jobs/prompts/humaneval.jsonl").read_text().splitlines()[:40]
    run.train_from_iterator([word for line in prompts for word in json.loads(line)["prompt"].split(" ")], trainer)
    data = json.loads(run.to_str())
    if kind != "byte_level":
        spaces = decoders.Replace("▁", " ")
        run.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
        tokens = [*SENTENCE_PIECE, *(f"<0x{byte:02X}>" for byte in range(256)), *data["model"]["vocab"]]
        data = json.loads(run.to_str())
        data["model"] |= {"vocab": {token: i for i, token in enumerate(tokens)}, "byte_fallback": True}
        run = Tokenizer.from_str(json.dumps(data))
        run.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    special = SPECIAL.get(kind, SENTENCE_PIECE)
    run.add_special_tokens([AddedToken(text, normalized=False, rstrip=text == "</s>") for text in special])
    run.add_tokens([AddedToken("<tool>", normalized=False)])
    return run.to_str()


def tokenizer_folder(folder: Path, kind: str, **settings: object) -> Path:
    """A folder with the tokenizer files of one kind."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json(kind))
    named = {"eos_token": "<|im_end|>", **({} if kind == "byte_level" else {"bos_token": "<s>"})}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **named, "chat_template": CHATML, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def chat_folder(folder: Path, template: str = PLAIN) -> Path:
    """The embedded model with a chat template, whose one control token is `<|endoftext|>`."""
    shutil.copytree(TINY, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "eos_token": "<|endoftext|>", "chat_template": template})
    )
    return folder
