"""The suites of invariance and of bits once more, on a small Llama: grouped queries, a window, rotary positions."""

from __future__ import annotations

from functools import partial

import pytest

from ember import LLM
from tests import test_bits, test_invariance
from tests.fakes import random_llama
from tests.test_bits import (  # noqa: F401
    expected,
    form,
    prompts,
    test_no_setting_changes_a_bit,
    test_threads_do_not_change_a_bit,
)
from tests.test_invariance import *  # noqa: F403

del test_a_second_call_is_like_a_first_one  # noqa: F821  # of the embedded model, in processes of its own


@pytest.fixture(scope="module", autouse=True)
def _llama(tmp_path_factory):
    """What these suites make of `LLM()` is the small Llama here."""
    llama = partial(LLM, random_llama(tmp_path_factory.mktemp("llama")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_bits, "LLM", llama)
        patch.setattr(test_invariance, "LLM", llama)
        yield


def test_it_is_the_llama():
    """Were the suites run on the embedded model once more, they would show nothing new."""
    assert test_invariance.make().plan.network.n_kv_head == 2
