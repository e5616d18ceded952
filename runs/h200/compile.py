"""Compiles the CUDA kernels for the H200 on a machine without one, as the ops launch them at the shapes of the 30B-A3B.

usage: python3 runs/h200/compile.py        (a minute or two; exit status 1 if a kernel does not compile or does not fit)

Prints registers, bytes of the stack (spills) and shared memory of each. What Triton's interpreter accepts need not
compile: this finds it before a GPU does. Nothing is run, so nothing is checked but that.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import triton
from torch import Tensor

from leyden.formats import Weight
from leyden.formats.fp8 import FP8
from leyden.formats.nvfp4 import NVFP4, Tiled
from leyden.ops.rows import Rows
from leyden.ops.triton import attention, conv, draft, eight, linear, moe, norm, nvfp4, qkv, sample, scan, ssm, wide
from leyden.ops.triton.compiling import Job, noted

SHARED = 232_448  # bytes that a program can have
DUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
BF, F32, F16, E4M3 = torch.bfloat16, torch.float32, torch.float16, torch.float8_e4m3fn
CUTS = ((4, 4, 4), (8, 8, 5), (8, 8, 4, True))  # of products of few rows
WIDE = (  # what section `wide` of check_and_time.py times beside the chosen
    wide.GATHERED_FEW, (1, 128, 128, 4, 8), (2, 128, 128, 4, 8), (2, 64, 128, 4, 4), (1, 256, 128, 4, 8),
    (2, 64, 128, 4, 8),
)  # fmt: skip
SEEN: set[str] = set()
BAD: list[str] = []


def overwritten(code: str) -> str:
    """The first instruction that writes a register from which a product on its way may still take its left operand, ""
    if there is none: products end in groups, when somebody waits for them, and a loop begins with what its end left."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/ +(?:@!?U?P\d+ +)?(\S+) *([^;]*);", code)
    place = {int(address, 16): i for i, (address, _, _) in enumerate(found)}

    def walk(begin: int, end: int, groups: list[set[int]]) -> str:
        for address, name, rest in found[begin:end]:
            if name.startswith("WARPGROUP.DEPBAR"):
                del groups[: max(0, len(groups) - 1 - int(rest.split(",")[1], 16))]  # the last one is not closed
            elif name.startswith("HGMMA"):
                if left := re.match(r"R\d+, R(\d+), gdesc", rest):
                    groups[-1] |= set(range(int(left[1]), int(left[1]) + 4))
                if "gsb0" in rest:
                    groups.append(set())
            elif (target := re.match(r"R(\d+)\b", rest)) and not name.startswith(("ST", "RED", "BAR")):
                width = 4 if re.search(r"\.128|M88\.4", name) else 2 if re.search(r"\.64|WIDE", name) else 1
                if set(range(int(target[1]), int(target[1]) + width)) & set().union(*groups):
                    return f"{address} {name} {rest}"
        return ""

    bad = walk(0, len(found), [set()])
    for i, (address, name, rest) in enumerate(found):
        target = re.search(r"0x([0-9a-f]+)", rest) if name == "BRA" else None
        if target and int(target[1], 16) < int(address, 16):
            groups: list[set[int]] = [set()]
            bad = bad or walk(place[int(target[1], 16)], i, groups) or walk(place[int(target[1], 16)], i, groups)
    return bad


def looked_at_twice(code: str) -> bool:
    """Whether two threads look at one of the cells that kernels exchange numbers through: see attention._join."""
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.blocked<\{(.*?), order", code, re.MULTILINE))
    for shape, layout in re.findall(r"isVolatile = true\} : tensor<([\dx]+)x!tt\.ptr<i32>, (#\w+)>", code):
        each, lanes, warps = (json.loads(part) for part in re.findall(r"\[.*?\]", layouts[layout]))
        cells = zip(map(int, shape.split("x")), each, lanes, warps, strict=True)
        if any(size < prod(parts) for size, *parts in cells):
            return True
    return False


def compiled(label: str, job: Job) -> None:
    source = job.source
    key = str((source.name, source.fn.__module__, source.signature, source.constants, source.attrs, job.options))
    if key in SEEN:
        return
    SEEN.add(key)
    name = f"{label:22s} {job.name:12s}"
    try:
        made = job.compile()
    except Exception as error:
        BAD.append(name)
        print(f"{name} FAILED {str(error)[-400:]} {error.__cause__!r}")
        return
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run([DUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        listing = subprocess.run([DUMP, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    code = made.asm["ttgir"]
    if re.search(r"warp_group_dot .*dot_op<\{opIdx = 0", code) and set(re.findall(r"pendings = (\d+)", code)) - {"0"}:
        BAD.append(name)  # see launch.complete
        print(f"{name} computes an operand in registers that a product of the iteration before may still read")
    if bad := overwritten(listing) if "HGMMA" in listing else "":
        BAD.append(name)
        print(f"{name} writes what a product may still read: {bad}")
    registers, stack = (int(re.findall(rf"{what}:(\d+)", usage)[-1]) for what in ("REG", "STACK"))
    if looked_at_twice(code):
        BAD.append(name)
        print(f"{name} looks at a cell from two threads")
    if made.metadata.shared > SHARED:
        BAD.append(name)
    print(f"{name} registers {registers:3d}  stack {stack:3d}  shared {made.metadata.shared:6d}", flush=True)


def under(label: str, call: Callable[..., object], *arguments: Any, **options: Any) -> None:
    with noted(90) as jobs:
        call(*arguments, **options)
    for job in jobs:
        compiled(label, job)


def empty(*shape: int, dtype: torch.dtype = BF) -> Tensor:
    return torch.empty(shape, dtype=dtype)  # never touched: it takes no memory


def weight(*shape: int, format: Any = None) -> Weight:
    return Weight(*shape, dtype=BF, format=format).requires_grad_(False)


def rows(lens: list[int], per: int = 72, total: int | None = None) -> Rows:
    count = len(lens)
    starts, past, slots, pages = (
        torch.empty(shape, dtype=torch.int32) for shape in ((count + 1,), (count,), (count,), (count, per))
    )
    return Rows(tuple(lens), starts, past, slots, pages, total)


def mamba() -> None:
    decays = (*(empty(64, dtype=F32) for _ in range(3)), (0.0, float("inf")))
    taps, tail = (empty(6144, 4), empty(6144)), (empty(4096), 8, 1e-5)
    for count in (1, 8, 64):
        ring, numbers = empty(count + 1, 4, 6208), torch.zeros(count, dtype=torch.int32)
        layer = *taps, *decays
        for dtype in (F32, F16):
            states = empty(count + 1, 3, 6144), empty(count + 1, 64, 64, 128, dtype=dtype)
            one, few = (empty(count, 10304), rows([1] * count)), (empty(4 * count, 10304), rows([4] * count))
            under(f"step {count}", ssm.mamba_step, one[0], *layer, *tail, *states, one[1], 5)
            began = torch.zeros(count + 1, dtype=torch.int32)
            recent = empty(count + 1, 15, 5184), began
            for rounds in (0, 5):
                under(f"lazy {count}", ssm.mamba_lazy_step, one[0], *layer, *tail, *states, *recent, one[1], rounds)
                fold = (decays[0], *decays[2:], 8, states[1], recent[0], numbers, numbers, numbers, rounds)
                under(f"fold {count}", ssm.mamba_fold, *fold)
            under(f"verify {count}", ssm.mamba_verify, few[0], *layer, *tail, *states, ring, few[1])
            under(f"replay {count}", ssm.mamba_replay, *layer, 8, *states, ring, numbers, numbers, numbers, 5)
    for lens, total in (([200], None), ([700], None), ([1000, 300], None), ([6] * 5, 6), ([512] * 5, 512)):
        batch = rows(lens, total=total)
        tokens = batch.tokens
        projected, state = empty(tokens, 10304), empty(3, 64, 64, 128, dtype=F32)
        under(f"conv {lens}", conv.causal_conv, projected[:, 4096:10240], *taps, empty(3, 3, 6144), batch)
        x, B, C = empty(tokens, 6144).split([4096, 1024, 1024], -1)
        x, B, C = x.unflatten(1, (64, 64)), B.unflatten(1, (8, 128)), C.unflatten(1, (8, 128))
        under(f"scan {lens}", scan.ssd_scan, x, projected[:, -64:], B, C, *decays, 128, state, batch)


def attend() -> None:
    for dtype in (BF, E4M3):
        cache = empty(2, 200, 16, 2, 128, dtype=dtype)
        matrices = [weight(size, 2688) for size in (4096, 256, 256)]
        for lens in ([1], [1, 1], [1] * 8, [4, 1, 3], [1] * 16, [4] * 4):
            x, label = empty(sum(lens), 2688), f"qkv {sum(lens)} in {len(lens)}"
            under(label, qkv.qkv_write, x, *matrices, cache, rows(lens), 0.5, 0.5)
        for lens, per, total in (
            ([1], 72, None), ([1], 2048, None), ([1] * 8, 72, None), ([1] * 64, 72, None), ([1] * 256, 72, None),
            ([2], 2048, None), ([4], 2048, None), ([8], 2048, None), ([8] * 4, 72, None), ([700], 72, None),
            ([6] * 5, 72, 6),
        ):  # fmt: skip
            batch, label = rows(lens, per, total), f"attention {lens[0]} x {len(lens)}"
            tokens = batch.tokens
            k = empty(tokens, 2, 128)
            under(label, attention.kv_write, k, k, cache, batch, 0.5, 0.5)
            under(label, attention.attention, empty(tokens, 32, 128), cache, batch, 0.5, 0.5)
    q, k, cache = empty(32, 32, 128), empty(32, 8, 128), empty(2, 200, 16, 8, 128)
    for sinks in (None, empty(32, dtype=F32)):
        under("blocks", attention.block_attention, q, k, k, cache, rows([16, 16]), False, None, sinks)


def products() -> None:
    for count in (1, 2, 8, 16, 64):
        for size, k in ((10304, 2688), (2688, 4096), (2688, 16128), (256, 2688), (131072, 2688)):
            x, in_sixteen, in_eight, in_four = (
                empty(count, k),
                *(weight(size, k, format=f) for f in (None, FP8(), Tiled(NVFP4()))),
            )
            if count <= linear.NARROW_ROWS:
                under(f"{count} x {size}", linear.linear, x, in_sixteen)
                for shape in CUTS if count > 1 else ():
                    under(f"{count} x {size} {shape}", linear.few, x, in_sixteen.dense(), True, F32, linear.Cut(*shape))
                if count > 1:
                    under(f"{count} x {size}, shared memory", linear.narrow, x, in_sixteen.dense())
            under(f"{count} x {size} fp8", linear.linear_fp8, x, in_eight)
            under(f"{count} x {size} nvfp4", nvfp4.linear_nvfp4, x, in_four, F32)
    gate = empty(128, 2688, dtype=F32), empty(128, dtype=F32)
    shapes = (128, 1856, 2688), (128, 2688, 1856), (3712, 2688), (2688, 3712)
    dense, packed = ([weight(*shape, format=form) for shape in shapes] for form in (None, Tiled(NVFP4())))
    for count in (1, 2, 8, 16, 64, 256, 600, 3000):
        x, ids, scores = empty(count, 2688), empty(count, 6, dtype=torch.int64), empty(count, 6, dtype=F32)
        if count == 1:
            under("sum and route", moe.add_norm_route, x, x, empty(2688), 1e-5, *gate, 6, 1, 1, True, 2.5)
        under(f"route {count}", moe.route, x, *gate, 6, 1, 1, True, 2.5)
        if count <= moe.DENSE_ROWS:
            under(f"experts {count}", moe.moe, x, ids, scores, *dense)
        else:
            under(f"experts {count}", moe.experts, x, ids, scores, *dense[:2])
        if count <= 256:
            under(f"experts {count} nvfp4", nvfp4.moe_nvfp4, x, ids, scores, *packed)
        else:
            under(f"experts {count} nvfp4", nvfp4.experts_nvfp4, x, ids, scores, *packed[:2])
    under("gate in thirds", moe._in_thirds, gate[0])
    larger = empty(64, 4096), empty(512, 4096, dtype=F32), empty(512, dtype=F32)
    under("route 64 of 512", moe.route, *larger, 22, 1, 1, True, 5.0)
    under("decoded nvfp4", nvfp4.decoded, packed[0])
    for matrix in packed:
        under(f"recoded {matrix.shape[-1]}", eight.operand, matrix)
    order, offsets = torch.zeros(49152, dtype=torch.int32), torch.zeros(129, dtype=torch.int32)
    for matrix, up in zip(packed, (True, False), strict=False):
        size, k = matrix.shape[1:]
        for shape in WIDE:
            gathered = empty(49152, k), matrix, empty(49152, size), up, (order, offsets), shape
            under(f"gathered {up} {shape}", wide.gathered_product, *gathered)
    under("gathered", wide.gathered, empty(8192, 2688), order, 6)
    for square in (False, True):
        for size in (2688, 1856, 4096):
            under(f"rounded {size} {square}", eight.rounded, empty(8192, size), square)
    under("rounded and gathered", eight.rounded, empty(8192, 2688), False, order, 6)
    ids, scores = empty(8192, 6, dtype=torch.int64).zero_(), empty(8192, 6, dtype=F32)
    under("experts in 8 bits", eight.experts, empty(8192, 2688), ids, scores, *packed[:2])
    under("widened fp8", linear.linear_fp8, empty(300, 16), weight(64, 16, format=FP8()))


def rest() -> None:
    for count in (1, 8, 64, 256):
        x, logits = empty(count, 2688), empty(count, 131072, dtype=F32)
        if count < 64:
            heads, angles = empty(count, 32, 128), empty(count, 64, dtype=F32)
            under(f"rotate {count}", draft.rotate, heads, angles, angles)
            under(f"angles {count}", draft.angles, torch.zeros(count, dtype=torch.int32), empty(64, dtype=F32), 1.0)
            gates = empty(count, 6144)
            under(f"silu_times {count}", draft.silu_times, gates, gates)
            to, ranks = empty(count, 7, 131072, dtype=F32)[:, 1], (None, Tiled(NVFP4()))
            for form, call in zip(ranks, (linear.add_linear, nvfp4.add_linear_nvfp4), strict=True):
                if form is not None or count <= linear.NARROW_ROWS:
                    under(f"add_linear {count}", call, empty(count, 512), weight(131072, 512, format=form), to)
        under(f"norms {count}", norm.add_rms_norm, x, x, empty(2688), 1e-5)
        floats, ints = empty(count, 6, dtype=F32), empty(count, 2, dtype=torch.int64)
        k, seeds = ints[:, 0], ints[:, 1]
        columns = floats[:, 0], k, floats[:, 1], floats[:, 2], seeds, seeds.contiguous()
        slots, ids = torch.zeros(count, dtype=torch.int32), torch.zeros(count, dtype=torch.int64)
        for width in (1, 3, 7):
            drawn = torch.zeros(count, width + 1, dtype=torch.int64)
            under(f"drafts {count} x {width}", draft.begin_drafts, slots, ids, drawn, slots, width)
            under(f"accept {count} x {width}", draft.accept, drawn, drawn[:, :-1], ids, drawn[:, 0], drawn, ids)
        under(f"sample {count}", sample.sample, logits, *columns)


if __name__ == "__main__":
    for part in (mamba, attend, products, rest):
        part()
    print(f"{len(SEEN)} kernels, {len(BAD)} of them bad: {BAD}")
    sys.exit(bool(BAD))
