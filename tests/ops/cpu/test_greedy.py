"""What the kernels write in fp32 is what the references write, token by token."""

import pytest
import torch

from leyden import ops
from leyden.ops.cpu.program import available
from leyden.types import Request, SamplingParams
from tests.engine.conftest import engine, run, tiny
from tests.engine.device import tokens_of

pytestmark = pytest.mark.skipif(not available, reason="the kernels need a C compiler")


def texts(seed: int) -> list[list[int]]:
    """Of prompts of 1 to 97 tokens that come one after the other and are answered side by side."""
    made = engine(tiny(seed=seed, dtype=torch.float32), seqs=4)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [[(31 * i + 7 * n) % 500 for i in range(n)] for n in (1, 20, 48, 97)]
    out = run(made, [(2 * i, Request(id=str(i), prompt=p, params=params)) for i, p in enumerate(prompts)])
    return [tokens_of(out[str(i)]) for i in range(len(prompts))]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_greedy_text_is_that_of_the_references(seed: int) -> None:
    found = texts(seed)
    with ops.using("reference"):
        assert found == texts(seed)
    assert all(len(text) == 40 for text in found)
