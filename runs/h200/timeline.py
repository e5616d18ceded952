"""What each launch of a decode step costs within the step: from the moment when it may begin to that of the next one.

usage: python3 runs/h200/timeline.py STEP ...      a STEP is ROWS:BITS:PERIOD, or few, from where on the formats are
those of the release: 1:32:1 256:16:16 few 1:16:1 (FP32 states; FP16 states of which one in 16 is written; few bits)

Dependent launches overlap, and so do the profiler's times of them. Here each kernel's wait() notes the GPU's clock
before and after: one program of a launch writes both down. The second is when the launch before was complete. PyTorch's
own kernels and cuBLAS's write nothing: their time is in that of the kernel before them.
"""

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import triton
import triton.language as tl
from gpu import MODEL, Step, build, in_few_bits, mixers
from triton.runtime.jit import JITFunction

from leyden.bench.kernels import graph, replay
from leyden.formats.nvfp4 import arrange
from leyden.ops import triton as kernels
from leyden.ops.triton import launch

_REPLAYS = 20
_ROOM = 1 << 17  # launches that can be noted
NOTES = torch.zeros(4 + 4 * _ROOM, dtype=torch.int64, device="cuda" if torch.cuda.is_available() else "cpu")

# In the first program of a launch its first thread takes the next free place: two clocks, then the sizes of the grid.
_ASSEMBLY = (
    "{ .reg .u64 before, after, at, to; .reg .u32 i, x, y, z; .reg .pred p; mov.u64 before, %globaltimer;"
    " griddepcontrol.wait; mov.u64 after, %globaltimer; mov.u32 x, %ctaid.x; mov.u32 y, %ctaid.y; mov.u32 z, %ctaid.z;"
    " or.b32 x, x, y; or.b32 x, x, z; mov.u32 y, %tid.x; or.b32 x, x, y; setp.eq.u32 p, x, 0; mov.u64 at, NOTES;"
    " mov.u32 i, 0; @p atom.global.add.u32 i, [at], 1; and.b32 i, i, LAST; mul.wide.u32 to, i, 32; add.u64 at, at, to;"
    " mov.u32 x, %nctaid.x; mov.u32 y, %nctaid.y; @p st.global.v2.u64 [at + 32], {before, after};"
    " @p st.global.v2.u32 [at + 48], {x, y}; mov.u32 $0, i; }"
)
_NOTE = tl.constexpr(_ASSEMBLY.replace("NOTES", str(NOTES.data_ptr())).replace("LAST", str(_ROOM - 1)))


@triton.jit
def wait():
    """launch.wait() with notes."""
    tl.inline_asm_elementwise(_NOTE, "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1)


def noting() -> list[str]:
    """Let all kernels make notes -> the names of those that are captured from now on, in their order."""
    silent = launch.wait
    for module in vars(kernels).values():
        if getattr(module, "wait", None) is silent:
            module.wait = wait
    names: list[str] = []
    run = JITFunction.run

    def named(self: Any, *args: Any, **options: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            names.append(f"{self.fn.__module__.rsplit('.', 1)[-1]}.{self.fn.__name__}")
        return run(self, *args, **options)

    JITFunction.run = named  # type: ignore
    return names


def launches() -> list[tuple[int, int, int, int]]:
    """(after, before, two sizes of the grid) of all that was noted, by time; nanoseconds."""
    count = int(NOTES[0])
    notes = NOTES[4 : 4 + 4 * count].view(count, 4).tolist()
    return sorted((after, before, sizes & 0xFFFFFFFF, sizes >> 32) for before, after, sizes, _ in notes)


def timeline(names: list[str], count: int, dtype: torch.dtype, period: int) -> None:
    names.clear()
    step = Step(count, ssm_dtype=dtype, period=period)
    made = graph(step)
    ms, seen = replay(made, 10, 25, 3), []
    for _ in range(_REPLAYS):
        NOTES.zero_()
        torch.cuda.synchronize()
        made.replay()
        torch.cuda.synchronize()
        seen.append(launches())
    seen = [one for one in seen if len(one) == len(names)]
    print(f"{count} rows, {str(dtype)[6:]} states, one in {period} written: {ms * 1e3:.0f} us, {len(names)} launches")
    if not seen:
        print("  not as many notes as launches: nothing is known of them")
        return
    total: dict[tuple[str, int, int], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for one in seen:
        for (after, before, x, y), name, (ended, *_) in zip(one, names, one[1:], strict=False):
            for i, value in enumerate((1, ended - after, after - before)):
                total[name, x, y][i] += value
    for (name, x, y), (times, took, early) in sorted(total.items(), key=lambda item: -item[1][1]):
        print(
            f"  {name:28s} {x:5d} x {y:4d} programs: {times / len(seen):4.0f} x {took / times / 1e3:7.2f} us"
            f" = {took / len(seen) / 1e3:8.1f}, there {early / times / 1e3:6.2f} us before"
        )
    del made, step
    torch.cuda.empty_cache()


def main(steps: list[str]) -> None:
    names = noting()
    build()
    for given in steps:
        if given == "few":
            in_few_bits()
            pairs = [pair for m in mixers("MoE") for pair in (m.experts, m.shared_experts)]
            for weight in (
                MODEL[0].lm_head,
                *(w for pair in pairs for w in (pair.up_proj, pair.down_proj)),
            ):
                arrange(weight)
            continue
        count, bits, period = map(int, given.split(":"))
        timeline(names, count, {16: torch.float16, 32: torch.float32}[bits], period)


if __name__ == "__main__":
    with torch.inference_mode():
        main(sys.argv[1:])
