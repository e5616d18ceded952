"""How the kernels of this folder are launched, and the few device buffers that outlive a call.

Programmatic dependent launch: a kernel may become resident while the one before it still runs. Everything that no
kernel of the step writes (weights, tables) may be loaded before wait(); everything else after it. Each kernel calls
wait() exactly once, on every path, and release() only after it: then whatever is two kernels old is complete before
wait(), too. Nothing is written before wait().

A kernel that waits for one which moves few bytes leaves memory idle. So programs with few bits to read also ask for the
weights that they will read to be brought into L2, as soon as it is known which those are: see prefetch(). Where
weights have 16 bits what is on its way already is as much as memory delivers meanwhile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))  # by the interpreter, which has no inline assembly


def _shared_memory() -> int:
    """Bytes that a program can have, an H200's where there is no GPU."""
    if not torch.cuda.is_available():
        return 232_448
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    known = 232_448 if properties.major in (9, 10) else 101_376
    return int(getattr(properties, "shared_memory_per_block_optin", known))


HOPPER = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0)
ROOMY = _shared_memory() >= 200_000  # data centres' GPUs have room for the largest tiles, those of desktops have not
PDL = tl.constexpr(HOPPER and not INTERPRETED.value)
OPTIONS = {"launch_pdl": True} if PDL.value else {}

AHEAD = 32 << 20  # bytes that the programs of a kernel that are there at first may ask for: L2 has 50 MB
MULTIPROCESSORS = 132
_RESIDENT = MULTIPROCESSORS * 32  # warps with 64 registers a thread

# The result is nothing; an instruction has to have one.
_PREFETCH = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }"
)

_COUNTERS = 1 << 16
_counters: dict[torch.device, Tensor] = {}


@triton.jit
def wait():
    """Until every kernel before this one is complete and its writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release():
    """Let the next kernel become resident; it does not get past its own wait() before this one ends."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(start, size, asks):
    """Into L2: `size` bytes from the pointer `start` on, less what is no multiple of 16 at either end, for each thread
    that asks. Nobody waits for them. Threads of a warp take turns, so it had better be one of each."""
    if PDL:
        first = (start.to(tl.int64) + 15) & -16
        size = (((start.to(tl.int64) + size) & -16) - first).to(tl.int32)
        tl.inline_asm_elementwise(
            _PREFETCH, "=r,l,r,r", [first, size, (asks & (size > 0)).to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def prefetch_share(start, total, program, EACH: tl.constexpr, THREADS: tl.constexpr):
    """prefetch() of this program's share of `total` bytes: EACH for each of its warps."""
    thread = tl.arange(0, THREADS)
    at = (program * (THREADS // 32) + thread // 32) * EACH
    prefetch(start.to(tl.pointer_type(tl.int8)) + at, tl.minimum(EACH, total - at), thread % 32 == 0)


@triton.jit
def arrive(counter, count):
    """True in the last of `count` programs: it sees what the others wrote before. Leaves the counter at zero."""
    tl.debug_barrier()  # all threads of this program have stored
    last = tl.atomic_add(counter, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def complete(acc):
    """The sum of products in a loop whose left operand is computed in registers. Triton 3.6 lets three of four parts of
    such a product run on into the next iteration, where these registers are written again; it waits for a sum that
    somebody looks at, as this instruction without instructions does."""
    if not INTERPRETED:
        acc = tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)
    return acc


def ahead(own: int, programs: int, warps: int) -> int:
    """How many of the `own` bytes of weights that it reads a program may ask for in advance."""
    return min(own, AHEAD // max(1, min(programs, _RESIDENT // warps)))


def shares(total: int, programs: int, warps: int) -> int:
    """The bytes for each warp, where `programs` ask for all of `total`, if that is not too much."""
    return triton.cdiv(total, 128 * programs * warps) * 128 if total <= AHEAD else 0


def counters(device: torch.device, count: int) -> Tensor:
    """int32 zeros for arrive(). Every kernel may use all of them: kernels that touch them never overlap."""
    assert count <= _COUNTERS
    if device not in _counters:
        _counters[device] = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
    return _counters[device]
