"""Everything that is decided before weights are loaded: model folder, tokenizer, dtype, context, size of the pool."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ember.attention.choice import check_pool, resolve_attention
from ember.cache.kv_pool import FP8, KVShape, num_blocks_for, stored_dtype
from ember.config import EngineConfig
from ember.core.decode_graphs import resolve_cuda_graphs
from ember.core.device_memory import PoolMeter
from ember.core.exactness import require_exact, why_not_exact
from ember.core.hardware import pool_bytes, resolve_device, resolve_dtype, total_bytes
from ember.data.hashes import FileHashes
from ember.entrypoints.structured_output import StructuredOutput
from ember.errors import ConfigError, UserError
from ember.model.chat_template import ChatTemplate
from ember.model.gguf_file import is_gguf
from ember.model.gpt2_config import GPT2Config
from ember.model.network import NetworkConfig, network_config
from ember.model.source import ModelFolder, find_model
from ember.model.tokenizer import Tokenizer
from ember.model.tokenizer_folder import load_tokenizer
from ember.parallel.cut import Joining, check_ranks
from ember.parallel.rank import RunnerSpec
from ember.sampling_params import SamplingParams
from ember.threads import check_threads, threads_of_a_rank

MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "merges.txt")
"""What of a model's folder its results depend on."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """A resolved EngineConfig: what a dry run shows and what an LLM is built from.

    `why_not_exact` says why the bits of logits may follow the batch; it is None where they never do. `chat` is None for
    a model without a chat template. With a `meter`, `num_blocks` is the most that the pool could have: how many there
    are is measured when the weights are loaded.
    """

    config: EngineConfig
    folder: ModelFolder
    network: NetworkConfig
    tokenizer: Tokenizer
    device: torch.device
    dtype: torch.dtype
    attention: str
    max_model_len: int
    kv_shape: KVShape
    num_blocks: int
    why_not_exact: str | None
    cuda_graphs: bool
    chat: ChatTemplate | None = None
    meter: PoolMeter | None = None

    @staticmethod
    def resolve(config: EngineConfig, num_sharing: int = 1) -> EnginePlan:
        """Find the model and size the pool; no weights are read. `num_sharing` engines share a device's memory.

        Raises:
            UserError: no such model, an unsupported feature, a pool too small; one line.
        """
        check_threads(config.num_threads, config.tensor_parallel_size)
        folder = find_model(config.model.name, config.model.path)
        with folder.blamed():
            network = network_config(folder.path)
            tokenizer = _tokenizer(folder, network)
            chat = _chat(folder, tokenizer, config)
        device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, device)
        if config.weights != "auto":
            from ember.model.quantized import check_weights  # with numba, which other plans do without

            check_weights(config.weights, device, dtype)
        num_ranks = config.tensor_parallel_size
        check_ranks(num_ranks, network, device)
        attention = resolve_attention(config.attention, device, dtype)
        cuda_graphs = resolve_cuda_graphs(config.cuda_graphs, device, attention, num_ranks)
        inexact = why_not_exact(device, dtype, config.weights, attention)
        require_exact(config.deterministic, inexact)
        max_model_len = _max_model_len(config.max_model_len, network.max_position)
        shape = _kv_shape(config, network, dtype, attention)
        check_pool(attention, shape, dtype, device)
        num_blocks = num_blocks_for(
            config.pool_size,
            shape,
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            free_bytes=pool_bytes(
                device, num_ranks, num_sharing=num_sharing, weight_bytes=_weight_bytes(network, dtype)
            ),
            total_bytes=total_bytes(device, num_ranks),
        )
        return EnginePlan(
            config=config,
            folder=folder,
            network=network,
            tokenizer=tokenizer,
            device=device,
            dtype=dtype,
            attention=attention,
            max_model_len=max_model_len,
            kv_shape=shape,
            num_blocks=num_blocks,
            why_not_exact=inexact,
            cuda_graphs=cuda_graphs,
            chat=chat,
            meter=PoolMeter(num_sharing=num_sharing) if device.type == "cuda" and config.pool_size == "auto" else None,
        )

    def runner_spec(self) -> RunnerSpec:
        """What the model runner is made of."""
        config = self.config
        return RunnerSpec(
            folder=self.folder.path,
            network=self.network,
            form=config.weights,
            dtype=self.dtype,
            device=self.device,
            attention=self.attention,
            kv_shape=self.kv_shape,
            num_blocks=self.num_blocks if self.meter is None else 1,
            num_threads=config.num_threads,
            num_ranks=config.tensor_parallel_size,
            joining=self._joining,
            cuda_graphs=self.cuda_graphs,
            max_num_seqs=config.max_num_seqs,
            max_model_len=self.max_model_len,
        )

    @property
    def _joining(self) -> Joining:
        """Sums that keep their bits, where there are bits to keep."""
        return Joining.GATHER if self.why_not_exact is None else Joining.ADD

    @property
    def model_name(self) -> str:
        """The model as the user calls it."""
        return self.folder.name

    def identity(self, hashes: FileHashes) -> dict[str, Any]:
        """See `JobPlan`: the content of the model's files, not their place, and all that can change a token."""
        model = {f"model.{path.name}": hashes.of(path) for path in _model_files(self.folder.path)}
        return {
            **model,
            "dtype": self.dtype_name,
            "weights": self.config.weights,
            "kv_dtype": self.kv_dtype_name,
            "attention": self.attention,
            "device": self.device.type,
            "max_model_len": self.max_model_len,
            **(self._ranks() if self._joining is Joining.ADD else {}),
            "chat_template": None if self.config.chat_template is None or self.chat is None else self.chat.digest,
        }

    def facts(self) -> dict[str, Any]:
        """See `JobPlan`."""
        own = {"model": self.model_name, "model_folder": str(self.folder.path)}
        return {**own, "kv_bytes_per_token": self.kv_bytes_per_token}

    def settings(self) -> dict[str, Any]:
        """See `JobPlan`."""
        config = self.config
        return {
            "model": self.model_name,
            "device": str(self.device),
            "dtype": self.dtype_name,
            "weights": self.dtype_name if config.weights == "auto" else config.weights,
            "kv_dtype": self.kv_dtype_name,
            "num_threads": self.num_threads,
            **self._ranks(),
            "attention": self.attention,
            "scheduler": config.scheduler,
            **({} if config.speculative == "off" else {"speculative": config.speculative}),
            "pool_size": config.pool_size,
        }

    def _ranks(self) -> dict[str, int]:
        size = self.config.tensor_parallel_size
        return {"tensor_parallel_size": size} if size > 1 else {}

    def check_sampling(self, params: SamplingParams) -> None:
        """Nothing, if the model has all tokens that the parameters name or ask for.

        Raises:
            ConfigError: it lacks some.
        """
        size = self.network.vocab_size
        for key in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            if unknown := [token for token in getattr(params, key) or () if token >= size]:
                raise ConfigError(key, unknown, f"the model's vocabulary ends at {size - 1}")
        for key in ("logprobs", "prompt_logprobs"):
            if (getattr(params, key) or 0) > size:
                raise ConfigError(key, getattr(params, key), f"the model's vocabulary has {size} tokens (-1: all)")

    def eos_token_ids(self, *, is_chat: bool) -> frozenset[int]:
        """The tokens that end an output; an answer also ends with the tokenizer's own EOS."""
        ids = frozenset(self.network.eos_token_ids)
        return ids | self.chat.stop_ids if is_chat and self.chat is not None else ids

    def structured_output(self) -> StructuredOutput:
        """What compiles the forms of this model's outputs."""
        eos = self.eos_token_ids(is_chat=False) | self.eos_token_ids(is_chat=True)
        return StructuredOutput(self.tokenizer, self.network.vocab_size, eos)

    @property
    def dtype_name(self) -> str:
        """The dtype as in the settings: float32, bfloat16 or float16."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def num_threads(self) -> int:
        """Threads that compute on a CPU, on all ranks; known when an LLM is loaded."""
        asked, num_ranks = self.config.num_threads, self.config.tensor_parallel_size
        of_one = torch.get_num_threads() if asked is None else threads_of_a_rank(asked, num_ranks)
        return of_one * num_ranks

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K/V that a token takes in the pool."""
        return self.kv_shape.bytes_per_block // self.config.block_size

    @property
    def kv_dtype_name(self) -> str:
        """The pool's dtype as in the settings: float32, bfloat16, float16, int8 or fp8."""
        return "fp8" if self.kv_shape.dtype == FP8 else str(self.kv_shape.dtype).removeprefix("torch.")


def _model_files(folder: Path) -> list[Path]:
    if is_gguf(folder):
        return [folder]
    return sorted({path for pattern in MODEL_FILES for path in folder.glob(pattern)})


def _kv_shape(config: EngineConfig, network: NetworkConfig, dtype: torch.dtype, attention: str) -> KVShape:
    return KVShape(
        n_layer=network.n_layer,
        n_kv_head=network.n_kv_head,
        head_dim=network.head_dim,
        block_size=config.block_size,
        dtype=dtype if config.kv_dtype == "auto" else stored_dtype(config.kv_dtype),
        interleaved=attention != "torch_varlen",
    )


def _weight_bytes(network: NetworkConfig, dtype: torch.dtype) -> int:
    return sum(math.prod(shape) for shape in network.weight_layout.shapes.values()) * dtype.itemsize


def _tokenizer(folder: ModelFolder, network: NetworkConfig) -> Tokenizer:
    tokenizer = load_tokenizer(folder.path, gpt2s_by_default=isinstance(network, GPT2Config))
    if tokenizer.vocab_size > network.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens but the network only {network.vocab_size}; the folder's "
            "vocab.json and merges.txt belong to another model, or are missing"
        )
    return tokenizer


def _chat(folder: ModelFolder, tokenizer: Tokenizer, config: EngineConfig) -> ChatTemplate | None:
    kwargs, now = config.chat_template_kwargs, config.chat_date
    return ChatTemplate.of_folder(folder.path, tokenizer, file=config.chat_template, kwargs=kwargs, now=now)


def _max_model_len(asked: int | None, max_position: int) -> int:
    if asked is not None and asked > max_position:
        raise ConfigError("max_model_len", asked, f"the model's context is {max_position} tokens; use at most that")
    return max_position if asked is None else asked
