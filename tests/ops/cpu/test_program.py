import pytest
import torch
from torch import Tensor

from leyden import ops
from leyden.ops.cpu.program import Arena, NotRecordable, Program, available, types
from leyden.ops.rows import Rows
from tests.batches import weight

pytestmark = pytest.mark.skipif(not available, reason="the kernels need a C compiler")


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def network(x: Tensor, depth: int = 6) -> Tensor:
    for i in range(depth):
        hidden = ops.mlp(x, MATRICES[2 * i], MATRICES[2 * i + 1])
        x, _ = ops.add_rms_norm(hidden, x, NORM, 1e-5)
    return x


NORM = torch.linspace(0.5, 1.5, 24)
MATRICES = [weight(*((40, 24) if i % 2 == 0 else (24, 40)), seed=i) for i in range(12)]


def test_a_program_does_again_what_the_function_did() -> None:
    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(0))
    program = Program(lambda: network(x), Arena())
    for seed in range(3):
        x.copy_(torch.randn(3, 24, generator=torch.Generator().manual_seed(seed)))
        assert torch.equal(program(), network(x))


def test_memory_is_used_again_and_shared_between_programs() -> None:
    arena, sizes = Arena(), []
    x = torch.randn(8, 24)
    programs = []
    for count in (8, 8, 5, 1):
        programs.append(Program(lambda count=count: network(x[:count]), arena))
        sizes.append(sum(len(block) for block in arena._blocks))
    # six layers of four tensors each: x, hidden, norm and sum of one layer, and of the next while both live
    assert sizes[0] <= 8 * 8 * 40 * 4
    assert sizes[-1] <= 2 * sizes[0]
    for count, program in zip((8, 8, 5, 1), programs, strict=True):
        assert torch.equal(program(), network(x[:count]))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + 1,
        lambda x: ops.rms_norm(x.float() * 2, NORM, 1e-5),
        lambda x: ops.rms_norm(x.zero_(), NORM, 1e-5),
        lambda x: ops.rms_norm(x[:, torch.arange(24).flip(0)], NORM, 1e-5),
        lambda x: ops.rms_norm(x.double(), NORM, 1e-5),  # the reference
        lambda x: x[: int(x[0, 0])],
    ],
)
def test_what_is_no_kernel_cannot_be_recorded(function) -> None:
    x = torch.ones(3, 24)
    with pytest.raises(NotRecordable):
        Program(lambda: function(x), Arena())
    assert torch.equal(ops.rms_norm(x, NORM, 0.0), x * NORM), "and ops run at once again"


def test_views_can_be_recorded() -> None:
    x = torch.randn(3, 48)
    taken = lambda: ops.rms_norm(x.view(6, 24)[2:].unflatten(0, (2, 2)).flatten(0, 1), NORM, 1e-5)  # noqa: E731
    assert torch.equal(Program(taken, Arena())(), taken())


@pytest.mark.parametrize("rounds", [0, 5])
def test_steps_of_states_can_be_recorded(rounds: int) -> None:
    """A step; then verify and replay of 1 to 3 tokens a row; slots, past and counts are read when the program runs.
    With rounds states are of 16 bits."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    heads, groups, dim, n, lens = 4, 2, 8, 16, (3, 1, 2)
    inner, channels = heads * dim, heads * dim + 2 * groups * n
    recurrence = (draw(channels, 4), draw(channels), draw(heads), draw(heads), draw(heads), (0.0, float("inf")))
    slots, past, counts = (torch.zeros(3, dtype=torch.int32) for _ in range(3))
    each, starts = torch.arange(4, dtype=torch.int32), torch.tensor([0, 3, 4, 6], dtype=torch.int32)
    projected, norm = draw(sum(lens), inner + channels + heads), draw(inner)
    dtype = torch.float16 if rounds and torch.float16 in types else torch.float32
    states = draw(5, 3, channels), draw(5, heads, dim, n).to(dtype), torch.zeros(5, 4, channels + heads)

    def step(states: tuple[Tensor, ...]) -> Tensor:
        one, rows = (Rows(n, at, past, slots, None) for n, at in (((1, 1, 1), each), (lens, starts)))
        ops.mamba_step(projected[:3], *recurrence, norm, groups, 1e-5, *states[:2], one, rounds)
        out = ops.mamba_verify(projected, *recurrence, norm, groups, 1e-5, *states, rows)
        ops.mamba_replay(*recurrence, groups, *states, slots, past, counts, rounds)
        return out

    kept = tuple(state.clone() for state in states)
    program = Program(lambda: step(kept), Arena())
    for state, same in zip(kept, states, strict=True):
        assert torch.equal(state, same), "recording does nothing"
    for taken in ([3, 1, 2], [0, 1, 1]):
        slots.copy_(torch.tensor([4, 1, 2]))
        past.copy_(torch.tensor([5, 0, 9]))
        counts.copy_(torch.tensor(taken))
        projected.copy_(draw(*projected.shape))
        assert torch.equal(program(), step(states))
        assert all(torch.equal(one, other) for one, other in zip(kept, states, strict=True))
