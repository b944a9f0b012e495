"""One engine for many callers: what they get, what giving up frees, how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from ember import LLM, SamplingParams
from ember.entrypoints.async_engine import AsyncEngine, EngineStopped, QueueFull, Request
from ember.entrypoints.generation import Generation
from tests.fakes import golden

CASES = golden()["cases"]
PROMPTS = [case["prompt_ids"] for case in CASES]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(device="cpu", dtype="float32", pool_size="4096tok", max_num_seqs=8, num_threads=1)


def requests(prompts: list[list[int]], **params) -> list[Request]:
    return [Request(prompt, SamplingParams(**params)) for prompt in prompts]


def with_engine(llm: LLM, use: Callable[[AsyncEngine], Awaitable[None]], *, max_open: int = 100) -> None:
    """Run `use` on a started engine, then stop it; nothing may be left."""

    async def run() -> None:
        engine = AsyncEngine(llm, max_open=max_open)
        engine.start()
        try:
            await asyncio.wait_for(use(engine), 60)
        finally:
            await engine.stop(0.0)
        assert engine.num_open == 0

    asyncio.run(run())
    assert llm.engine.num_unfinished == 0
    assert llm.engine.scheduler.blocks.num_used == 0


async def text(generation: Generation) -> list[str]:
    """The texts of a generation, put together from its pieces."""
    texts = [""] * generation.num_open
    while pieces := await generation.pieces():
        for piece in pieces:
            texts[piece.index] += piece.text
    return texts


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def test_many_callers_get_what_each_would_alone(llm: LLM) -> None:
    """Requests that join a running batch must not change one another."""
    offline = [output.text for output in llm.generate(PROMPTS, SamplingParams(max_tokens=20))]

    async def use(engine: AsyncEngine) -> None:
        calls = []
        for prompt in PROMPTS:
            calls.append(asyncio.create_task(text(engine.submit(requests([prompt], max_tokens=20), stream=True))))
            await asyncio.sleep(0.002)
        assert [texts[0] for texts in await asyncio.gather(*calls)] == offline
        whole = await engine.submit(requests(PROMPTS, max_tokens=20), stream=False).outputs()
        assert [output.text for output in whole] == offline

    with_engine(llm, use)


def test_giving_up_frees_the_blocks(llm: LLM) -> None:
    """A client that goes away must not hold its place until `max_tokens`."""

    async def use(engine: AsyncEngine) -> None:
        generation = engine.submit(requests(PROMPTS[:4], max_tokens=400, ignore_eos=True), stream=True)
        await generation.pieces()
        assert llm.engine.scheduler.blocks.num_used
        generation.give_up()
        generation.give_up()
        assert await generation.pieces() == []
        await until(lambda: engine.num_open == 0)
        assert llm.engine.scheduler.blocks.num_used == 0
        assert llm.engine.num_unfinished == 0

    with_engine(llm, use)


def test_the_queue_is_bounded(llm: LLM) -> None:
    async def use(engine: AsyncEngine) -> None:
        first = engine.submit(requests(PROMPTS[:3], max_tokens=400, ignore_eos=True), stream=False)
        with pytest.raises(QueueFull):
            engine.submit(requests(PROMPTS[:2]), stream=False)
        first.give_up()
        await until(lambda: engine.num_open == 0)
        outputs = await engine.submit(requests(PROMPTS[:4], max_tokens=1), stream=False).outputs()
        assert len(outputs) == 4

    with_engine(llm, use, max_open=4)


def test_stopping_lets_open_requests_finish_or_fails_them(llm: LLM) -> None:
    """A request that was taken must hear how it ended."""

    async def use(engine: AsyncEngine) -> None:
        short = engine.submit(requests(PROMPTS[:1], max_tokens=4), stream=False)
        assert await engine.stop(30.0) == 0
        assert (await short.outputs())[0].error is None
        with pytest.raises(EngineStopped):
            engine.submit(requests(PROMPTS[:1]), stream=False)

    with_engine(llm, use)

    async def hurried(engine: AsyncEngine) -> None:
        long = engine.submit(requests(PROMPTS[:2], max_tokens=400, ignore_eos=True), stream=True)
        await long.pieces()
        assert await engine.stop(0.0) == 2
        outputs = await long.outputs()
        assert [output.error_kind for output in outputs] == ["server_stopped"] * 2

    with_engine(llm, hurried)


def test_the_samples_of_a_prompt_are_choices(llm: LLM) -> None:
    """Sample j of prompt i is choice i * n + j, drawn as offline."""
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=12)
    offline = [done.text for output in llm.generate(PROMPTS[:2], params) for done in output.outputs]
    asked = [Request(prompt, params) for prompt in PROMPTS[:2]]

    async def use(engine: AsyncEngine) -> None:
        assert await text(engine.submit(asked, stream=True)) == offline
        outputs = await engine.submit(asked, stream=False).outputs()
        assert [output.text for output in outputs] == offline
        engine.submit(asked, stream=True).give_up()
        await until(lambda: engine.num_open == 0)

    with_engine(llm, use)


def test_requests_with_nothing_to_compute_end_at_once(llm: LLM) -> None:
    """They are done before the next of their call is in line."""

    async def use(engine: AsyncEngine) -> None:
        for stream in (False, True):
            outputs = await engine.submit(requests(PROMPTS[:3], max_tokens=0), stream=stream).outputs()
            assert [output.finish_reason for output in outputs] == ["length"] * 3
        assert engine.healthy

    with_engine(llm, use)


def test_a_bug_in_a_step_fails_its_requests_and_no_later_one(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that dies leaves a server that answers nothing."""

    async def use(engine: AsyncEngine) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.runner, "execute", lambda scheduled: 1 / 0)
            broken = await engine.submit(requests(PROMPTS[:2], max_tokens=4), stream=True).outputs()
        assert [output.error_kind for output in broken] == ["internal_error"] * 2
        fine = await engine.submit(requests(PROMPTS[:1], max_tokens=4), stream=False).outputs()
        assert fine[0].error is None

    with_engine(llm, use)


def test_a_bug_after_a_sequence_of_the_step_has_ended(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was gone from the engine and live outside of it: giving up the rest ended the thread, and blocks stayed."""
    push = llm._outputs.push

    def fail_at_the_second(request_id: int, token_id: int) -> str | None:
        return push(request_id, token_id) if request_id % 2 == first % 2 else str(1 / 0)

    async def use(engine: AsyncEngine) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(llm._outputs, "push", fail_at_the_second)
            broken = await engine.submit(requests(PROMPTS[:2], max_tokens=1), stream=False).outputs()
        assert [output.error_kind for output in broken] == ["internal_error"] * 2
        assert (engine.healthy, llm.engine.scheduler.blocks.num_used) == (True, 0)
        assert (await engine.submit(requests(PROMPTS[:1], max_tokens=4), stream=False).outputs())[0].error is None

    first = next(llm._ids) + 1
    with_engine(llm, use)


def test_a_dead_thread_fails_what_is_open_and_takes_no_more(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers would wait for ever."""

    async def use(engine: AsyncEngine) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.runner, "execute", lambda scheduled: exit())
            outputs = await engine.submit(requests(PROMPTS[:2], max_tokens=4), stream=False).outputs()
        assert [output.error_kind for output in outputs] == ["internal_error"] * 2
        await until(lambda: not engine.healthy)
        with pytest.raises(EngineStopped):
            engine.submit(requests(PROMPTS[:1]), stream=False)
        llm.abort_all()

    with_engine(llm, use)
