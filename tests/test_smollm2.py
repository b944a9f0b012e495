"""A chat model with real weights: SmolLM2-135M-Instruct, in the folder that EMBER_SMOLLM2 names.

`python -m tests.make_smollm2 FOLDER` makes it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import ember
from ember import LLM, SamplingParams
from ember.core.sequence import FinishReason

ROOT = Path(ember.__file__).parent.parent
FOLDER = os.environ.get("EMBER_SMOLLM2", "")
pytestmark = [pytest.mark.smollm2, pytest.mark.skipif(not FOLDER, reason="needs the SmolLM2 package")]


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(FOLDER, max_model_len=1024, max_num_seqs=20)


def test_the_capital_of_france(llm: LLM) -> None:
    """Weights in a wrong place still give fluent text, but no knowledge."""
    assert llm.generate("The capital of France is", SamplingParams(max_tokens=4))[0].text.startswith(" Paris")


def test_an_answer_ends(llm: LLM) -> None:
    """Without the chat model's own EOS an answer runs on, into a conversation with itself."""
    answer = llm.chat(user("Name three fruits."), SamplingParams(max_tokens=64))[0]
    assert answer.finish_reason is FinishReason.STOP
    assert answer.token_ids[-1] == llm.plan.tokenizer.special["<|im_end|>"]
    assert "Bananas" in answer.text and "<|im_end|>" not in answer.text


def test_tokens_of_transformers(llm: LLM) -> None:
    """Template, tokenizer, network and sampling together: any of them off by a little shows in twenty answers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lines = (ROOT / "jobs/prompts/mtbench.jsonl").read_text().splitlines()[:20]
    chats = [user(json.loads(line)["prompt"]) for line in lines]
    answers = llm.chat(chats, SamplingParams(max_tokens=16))
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    end = llm.plan.tokenizer.special["<|im_end|>"]
    for chat, answer in zip(chats, answers, strict=True):
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert answer.prompt_token_ids == ids
        asked = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": end, "pad_token_id": end}
        with torch.no_grad():
            theirs = model.generate(torch.tensor([ids]), **asked)[0, len(ids) :].tolist()
        assert answer.token_ids == theirs
        assert answer.text == tokenizer.decode(theirs, skip_special_tokens=True)


def test_the_gguf_file_and_the_folder_make_the_same_tokens(llm: LLM) -> None:
    """Weights, tokenizer, template and EOS out of one file: whatever is read otherwise shows."""
    file = next(Path(FOLDER).glob("*.gguf"))
    other = LLM(file, max_model_len=1024, max_num_seqs=20)
    lines = (ROOT / "jobs/prompts/mtbench.jsonl").read_text().splitlines()[20:40]
    chats = [user(json.loads(line)["prompt"]) for line in lines]
    chats.append(user("It's 12345 o'clock,\n\n  na\u00efve \u65e5\u672c <|im_end|>"))
    ours, theirs = (one.chat(chats, SamplingParams(max_tokens=16)) for one in (other, llm))
    for mine, its in zip(ours, theirs, strict=True):
        assert (mine.prompt, mine.prompt_token_ids) == (its.prompt, its.prompt_token_ids)
        assert (mine.token_ids, mine.finish_reason) == (its.token_ids, its.finish_reason)
