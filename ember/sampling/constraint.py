"""What the engine knows of structured output: something that says which tokens may come next."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class TokenConstraint(Protocol):
    """A function of the output so far, whatever it was asked before: a preemption leaves no trace in it."""

    def allowed(self, output_token_ids: list[int]) -> NDArray[np.bool_]:
        """Whether each token may follow the output: bool [vocab_size].

        Raises:
            RequestError: it can't tell; the request ends with it.
        """
