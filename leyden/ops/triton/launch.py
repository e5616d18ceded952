"""How the kernels of this folder are launched, and the few device buffers that outlive a call.

Programmatic dependent launch: a kernel may become resident while the one before it still runs. Everything that no
kernel of the step writes (weights, tables) may be loaded before wait(); everything else after it. Each kernel calls
wait() exactly once, on every path, and release() only after it: then whatever is two kernels old is complete before
wait(), too. Nothing is written before wait().
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)
HOPPER = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0)
PDL = tl.constexpr(HOPPER and not INTERPRETED)  # the interpreter has no inline assembly
_INTERPRETED = tl.constexpr(INTERPRETED)
OPTIONS = {"launch_pdl": True} if PDL.value else {}

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
    if not _INTERPRETED:
        acc = tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)
    return acc


def counters(device: torch.device, count: int) -> Tensor:
    """int32 zeros for arrive(). Every kernel may use all of them: kernels that touch them never overlap."""
    assert count <= _COUNTERS
    if device not in _counters:
        _counters[device] = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
    return _counters[device]
