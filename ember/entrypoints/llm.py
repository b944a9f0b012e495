"""The Python API: load a model once, generate many times. Jobs run on it too, through `add` and `step`."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from dataclasses import fields
from itertools import count
from typing import Any

from ember.beam_search import BeamSearch
from ember.cache.block_manager import BlockManager
from ember.cache.prefix_cache import PrefixCache
from ember.config import EngineConfig, ModelConfig
from ember.core.batch import StepOutput
from ember.core.engine import Engine
from ember.core.random_stream import row_seed
from ember.core.sampler import Sampler
from ember.core.scheduler import Scheduler
from ember.core.sequence import FinishReason, Sequence
from ember.data.logprobs import PositionLogprobs
from ember.data.output import CompletionOutput, OutputProcessor, RequestOutput
from ember.entrypoints.admission import Admission, Limits
from ember.entrypoints.live_request import LiveRequest
from ember.entrypoints.measured_pool import with_measured_pool
from ember.entrypoints.plan import EnginePlan
from ember.errors import RequestError, UserError
from ember.model.chat_template import ChatPrompt
from ember.model.conversation import Conversation
from ember.model.source import is_preset
from ember.parallel.runner import ParallelRunner
from ember.sampling.constraint import TokenConstraint
from ember.sampling_params import SamplingParams
from ember.speculation.proposer import make_proposer

Prompt = str | list[int] | Conversation | ChatPrompt


class LLM:
    """A model with its engine.

    Args:
        model: a preset (`gpt2`), a local folder, a Hub repo id (`org/name[@revision]`), or None: the embedded model.
        settings: any field of `EngineConfig` (`block_size=16, pool_size="4096tok", seed=1, ...`).

    Raises:
        UserError: a wrong setting or a model that can't be loaded; one line that names the remedy.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        _check_names(settings)
        model = None if model is None else os.fspath(model)
        if model is None:
            chosen = ModelConfig()
        else:
            chosen = ModelConfig(name=model) if is_preset(model) else ModelConfig(path=model)
        self._load(EnginePlan.resolve(EngineConfig(model=chosen, **settings)))

    @classmethod
    def from_plan(cls, plan: EnginePlan) -> LLM:
        """An LLM of a plan that is already resolved."""
        llm = cls.__new__(cls)
        llm._load(plan)
        return llm

    def _load(self, plan: EnginePlan) -> None:
        spec, config = plan.runner_spec(), plan.config
        with plan.folder.blamed():
            self._runner = spec.load() if spec.num_ranks == 1 else ParallelRunner(spec)
        try:
            self.plan = plan = with_measured_pool(plan, self._runner)
        except BaseException:
            self.close()
            raise
        scheduler = Scheduler(
            BlockManager(
                plan.num_blocks,
                config.block_size,
                _prefix_cache(plan),
                reserved_tokens=plan.max_model_len if config.reservation == "max" else 0,
            ),
            policy=config.scheduler,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            prefill_share=config.prefill_share,
            proposer=make_proposer(config),
        )
        waits_late = plan.device.type == "cuda" and spec.num_ranks == 1  # several ranks wait for each step's end
        self.engine = Engine(scheduler, self._runner, Sampler(), plans_ahead=waits_late)
        self._outputs = OutputProcessor(plan.tokenizer, plan.tokenizer.special)
        self._structured_output = plan.structured_output()
        self._live: dict[int, LiveRequest] = {}
        self._ids = count()  # of sequences in the engine

    def close(self) -> None:
        """End the processes of the other ranks (tensor_parallel_size above 1); nothing is computed after that."""
        if isinstance(self._runner, ParallelRunner):
            self._runner.close()

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; results come in the order of the prompts.

        Args:
            prompts: one string, or a list of strings or of token-id lists.
            sampling_params: one for all, or one a prompt; None is greedy with 128 tokens.

        Returns:
            One RequestOutput a prompt, with `n` samples in `outputs`. A prompt that can't run has `finish_reason` error
            and says why in `error`.

        Raises:
            UserError: the numbers of prompts and of sampling parameters differ.
        """
        asked = _as_list(prompts)
        params = _one_each(sampling_params, len(asked))
        results: dict[int, RequestOutput] = {}
        try:
            for index, (prompt, chosen) in enumerate(zip(asked, params, strict=True)):
                failed = self.add(index, prompt, chosen)
                if failed is not None:
                    results[index] = failed
            while self.engine.num_unfinished:
                results.update({output.request_id: output for output in self.step()[0]})
        finally:
            self.abort_all()
        return [results[index] for index in range(len(asked))]

    def chat(
        self,
        conversations: Seq[dict[str, Any]] | Seq[Seq[dict[str, Any]]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations; each is a prompt that the model's chat template makes.

        One that ends with a message of the assistant's is continued there.

        Args:
            conversations: one list of messages (`{"role": ..., "content": ...}`), or a list of such lists.
            sampling_params: as in `generate`.

        Returns:
            As `generate`; `prompt` is the rendered text.

        Raises:
            UserError: messages of another shape, or as `generate`.
        """
        single = not conversations or isinstance(conversations[0], dict)
        given: Seq[Any] = [conversations] if single else conversations
        return self.generate([Conversation.of(messages) for messages in given], sampling_params)

    def add(
        self,
        request_id: int,
        prompt: Prompt,
        params: SamplingParams,
        *,
        allow_special_tokens: bool = False,
        samples_done: Collection[int] = (),
        together: bool = True,
    ) -> RequestOutput | None:
        """Put one request in line under an id that no live request has.

        The row's seed is `params.seed`, or follows from the engine's seed and `request_id`.

        Args:
            samples_done: numbers of samples that are not to be computed; not all.
            together: its result comes when all samples are finished; else each comes as it finishes.

        Returns:
            None, or at once the result of a request with nothing to compute: an error, or `max_tokens=0`.
        """
        seed = row_seed(self.plan.config.seed, request_id) if params.seed is None else params.seed
        text, is_chat = prompt if isinstance(prompt, str) else None, isinstance(prompt, Conversation | ChatPrompt)
        result = RequestOutput(request_id=request_id, prompt=text, seed=seed, num_samples=params.n)
        samples = [i for i in range(params.n) if params.ranked or i not in samples_done]
        admission = Admission(self.plan, self._structured_output)
        computed = range(params.num_sequences) if params.ranked else samples
        try:
            if isinstance(prompt, Conversation):
                prompt = admission.chat_prompt(prompt)
            if isinstance(prompt, ChatPrompt):
                result.prompt, prompt = prompt.text, prompt.token_ids
            result.prompt_token_ids = admission.token_ids(prompt, params, allow_special_tokens=allow_special_tokens)
            room = admission.room(len(result.prompt_token_ids), params)
            limits = admission.limits(params, len(computed), is_chat=is_chat)
        except RequestError as error:
            return result.with_error(error, samples)
        if room == 0 and params.prompt_logprobs is None:
            result.outputs = [CompletionOutput(i, finish_reason=FinishReason.LENGTH) for i in samples]
            return result
        live = self._live[request_id] = LiveRequest(result, together or params.ranked, params)
        leader, *children = (
            self._sequence(result, params, i, room, limits, matcher)
            for i, matcher in zip(computed, limits.matchers, strict=True)
        )
        leader.children = children
        _join_search(leader)
        for sequence in leader.family:
            live.sequence_ids[sequence.sample_index] = sequence.request_id
            sequence.prompt_logprobs = leader.prompt_logprobs
            self._outputs.add(sequence)
        self.engine.add(leader)
        return None

    def _sequence(
        self,
        result: RequestOutput,
        params: SamplingParams,
        sample_index: int,
        max_tokens: int,
        limits: Limits,
        constraint: TokenConstraint | None,
    ) -> Sequence:
        assert result.seed is not None
        return Sequence(
            request_id=next(self._ids),
            token_ids=list(result.prompt_token_ids),
            params=params,
            seed=result.seed,
            max_tokens=max_tokens,
            sample_index=sample_index,
            parent_id=result.request_id,
            stop_ids=limits.stop_ids,
            bad_words=limits.bad_words,
            constraint=constraint,
        )

    def step(self) -> tuple[list[RequestOutput], StepOutput]:
        """Run one step; returns the results of the samples that it finished, and what the step did."""
        out = self.engine.step(self._outputs.push)
        results = [self._drop(s).take(self._outputs.finish(s)) for s in out.finished]
        return [result for result in results if result is not None], out

    def text_so_far(self, request_id: int, sample_index: int = 0) -> str:
        """The text of a live sample; a stop string may still cut it, and an unfinished character is not in it."""
        return self._outputs.text_so_far(self._live[request_id].sequence_ids[sample_index])

    def logprobs_since(self, request_id: int, sample_index: int, start: int) -> list[PositionLogprobs] | None:
        """Log-probabilities of a live sample's output from token `start` on; None unless asked for."""
        return self._outputs.logprobs_since(self._live[request_id].sequence_ids[sample_index], start)

    def abort(self, request_id: int) -> None:
        """Give up what is left of a live request; its blocks are free at once."""
        ids = list(self._live[request_id].sequence_ids.values())
        self._discard([self.engine.abort(i) for i in ids if i in self.engine])
        if self._live.pop(request_id, None) is not None:  # a step that broke off had finished some
            for sequence_id in ids:
                self._outputs.discard(sequence_id)

    def abort_waiting(self) -> set[int]:
        """Give up the samples that are in line, and those that only matter together with them.

        Returns:
            The requests that lost some.
        """
        lost = self._discard(self.engine.abort_waiting())
        stranded = [i for i in lost if i in self._live and self._live[i].together]
        for request_id in stranded:
            self.abort(request_id)
        return lost

    def abort_all(self) -> set[int]:
        """Give up all requests, also what is left of a step that an exception broke off; returns their ids."""
        requests = set(self._live)
        self.engine.abort_all()
        for sequence_id in (i for live in self._live.values() for i in live.sequence_ids.values()):
            self._outputs.discard(sequence_id)
        self._live.clear()
        return requests

    def reset_prefix_cache(self) -> None:
        """Forget the K/V of all earlier prompts and outputs, as if the model were just loaded."""
        self.engine.scheduler.blocks.clear_cache()

    def _discard(self, sequences: list[Sequence]) -> set[int]:
        """Forget sequences that were given up; returns their requests."""
        for sequence in sequences:
            self._outputs.discard(sequence.request_id)
            self._drop(sequence)
        return {sequence.parent_id for sequence in sequences}

    def _drop(self, sequence: Sequence) -> LiveRequest:
        """Note that a sequence has ended; with its last one a request is no longer live."""
        live = self._live[sequence.parent_id]
        del live.sequence_ids[sequence.sample_index]
        if not live.sequence_ids:
            del self._live[sequence.parent_id]
        return live


def _join_search(leader: Sequence) -> None:
    """Make a family the beams of one search, if that is what its parameters ask for."""
    params, beams = leader.params, leader.family
    if params.beam_width is None:
        return
    search = BeamSearch(
        params.beam_width,
        stop_ids=leader.stop_ids,
        max_tokens=leader.max_tokens,
        min_tokens=params.min_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
    )
    for beam in beams:
        beam.search, beam.beams = search, beams


def _prefix_cache(plan: EnginePlan) -> PrefixCache | None:
    if not plan.config.prefix_cache:
        return None
    seed = f"{plan.folder.path} {plan.dtype_name} {plan.config.weights} {plan.kv_dtype_name} {plan.attention}"
    return PrefixCache(plan.config.block_size, seed.encode())


def _check_names(settings: Iterable[str]) -> None:
    known = [field.name for field in fields(EngineConfig) if field.name != "model"]
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.7)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
            raise UserError(f"{key}: no such setting of an LLM; {hint}")


def _as_list(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise UserError(
            f"prompts must be a string or a list of strings or token-id lists, not {type(prompts).__name__}"
        )
    items = list(prompts)
    return [items] if items and all(isinstance(item, int) for item in items) else items


def _one_each(params: SamplingParams | Seq[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, (list, tuple)) or not all(isinstance(p, SamplingParams) for p in params):
        raise UserError("sampling_params must be a SamplingParams, or a list with one a prompt")
    if len(params) != num_prompts:
        raise UserError(f"{num_prompts} prompts but {len(params)} sampling_params; give one for all, or one a prompt")
    return list(params)
