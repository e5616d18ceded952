"""Mamba-2: short causal convolution, state-space scan, and the fused one-token step.

Sources of the formulas: Dao and Gu, "Transformers are SSMs" (2024), sections 6 and 7; state-spaces/mamba for the
conventions (order of the projections, softplus of dt, gate before norm). Everything is computed in fp32 and rounded to
the activations' dtype (outputs) or the pool's dtype (states) at the end. A row with past == 0 starts from a zero
state, whatever its slot holds.
"""

from dataclasses import replace
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from leyden.ops.reference.norm import gated_norm
from leyden.ops.reference.philox import philox
from leyden.ops.rows import Rows


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, rows: Rows) -> Tensor:
    """silu(bias[c] + sum_j weight[c, j] * x[t - (K - 1) + j, c]) -> [T, C]; tap K - 1 is the token itself.

    x [T, C], weight [C, K], bias [C]. Before a row's first token stand the columns of state [slots, K - 1, C] (its
    last inputs, oldest first), or zeros. The state at rows.slots becomes the last K - 1 columns seen.
    """
    reach = weight.shape[1] - 1
    count, device = len(rows.lens), x.device
    before = _initial(state, rows) if state is not None else x.new_zeros(count, reach, x.shape[1])
    # One line: every row preceded by its `reach` earlier columns.
    lens = torch.tensor(rows.lens, device=device)
    row = torch.repeat_interleave(torch.arange(count, device=device), lens, output_size=len(x))
    cells = torch.arange(len(x), device=device) + (row + 1) * reach
    heads = rows.starts[:-1, None] + torch.arange(count * reach, device=device).view(count, reach)
    line = x.new_zeros(len(x) + count * reach, x.shape[1]).index_copy(0, cells, x)
    line = line.index_copy(0, heads.flatten(), before.flatten(0, 1).to(x.dtype))
    out = torch.zeros_like(x, dtype=torch.float32) if bias is None else bias.float().expand_as(x)
    for tap in range(reach + 1):
        out = out + line[cells - reach + tap].float() * weight[:, tap].float()
    if state is not None:
        state[rows.slots] = line[heads + lens[:, None]].to(state.dtype)
    return F.silu(out).to(x.dtype)


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    A_log: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    chunk: int,
    state: Tensor | None,
    rows: Rows,
) -> Tensor:
    """The selective scan of rows of any length, in chunks -> y [T, heads, dim].

        dt' = clamp(softplus(dt + dt_bias));  S = exp(-exp(A_log) dt') S + dt' x B^T;  y = S C + D x

    x [T, heads, dim], dt [T, heads] as projected, B and C [T, groups, N] (head h uses group h // (heads / groups)),
    A_log, D, dt_bias fp32 [heads]. state [slots, heads, dim, N] gives S before each row and takes S after it. Chunks
    restart at each row, and `chunk` tokens is only a matter of speed.
    """
    grid = _Grid(rows, chunk, x.device)
    groups = B.shape[1]
    # c chunk, l and s token in the chunk (l >= s), g group, r head in the group, p head dim, n state. Grid cells
    # without a token are zero: they neither decay the state nor add to it.
    delta = grid.lay(_time_step(dt, dt_bias, dt_limit)).unflatten(-1, (groups, -1))
    inputs = grid.lay(x.float()).unflatten(-2, (groups, -1)) * delta[..., None]
    B, C = grid.lay(B.float()), grid.lay(C.float())
    decay = (delta * -A_log.exp().view(groups, -1)).cumsum(1)  # log of the decay from the chunk's start through l

    since = decay[:, :, None] - decay[:, None]  # [c, l, s, g, r]
    future = torch.ones(since.shape[1:3], dtype=torch.bool, device=x.device).triu(1)[..., None, None]
    since = since.masked_fill(future, float("-inf")).exp()  # masked before exp, which would overflow there
    scores = torch.einsum("clgn,csgn->clsg", C, B)[..., None] * since
    y = torch.einsum("clsgr,csgrp->clgrp", scores, inputs)

    leftover = (decay[:, -1:] - decay).exp()[..., None] * inputs
    added = torch.einsum("csgrp,csgn->cgrpn", leftover, B)
    before = x.new_zeros(len(rows.lens), *added.shape[1:], dtype=torch.float32)
    if state is not None:
        before = _initial(state, rows).float().view_as(before)
    entering, final = grid.carry(before, decay[:, -1].exp()[..., None, None], added)
    y = y + torch.einsum("clgn,cgrpn->clgrp", C, entering) * decay.exp()[..., None]

    if state is not None:
        state[rows.slots] = final.view(-1, *state.shape[1:]).to(state.dtype)
    return (grid.take(y).flatten(1, 2) + x.float() * D[:, None]).to(x.dtype)


def mamba_step(
    projected: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    norm_weight: Tensor,
    groups: int,
    eps: float,
    conv_state: Tensor,
    ssm_state: Tensor,
    rows: Rows,
    rounds: int = 0,
) -> Tensor:
    """Rows of one token: convolution, time step, state update, gate and group norm -> [R, inner].

    projected [R, inner + (inner + 2 groups N) + heads] is in_proj's output, in the order z, xBC, dt; the other
    arguments are those of causal_conv, ssd_scan and gated_norm, one after the other. Both states are updated. With
    `rounds` an fp16 state is rounded as at_random() does it, else to nearest.
    """
    z, x, B, C, dt = _convolved(projected, conv_weight, conv_bias, len(A_log), len(norm_weight), conv_state, rows)
    state = _moved(_initial(ssm_state, rows).float(), x, dt, B, A_log, dt_bias, dt_limit, groups)
    ssm_state[rows.slots] = _stored(state, ssm_state.dtype, A_log, rows.past, rounds)
    return _read(state, x, C, D, z, norm_weight, groups, eps)


def mamba_lazy_step(
    projected: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    norm_weight: Tensor,
    groups: int,
    eps: float,
    conv_state: Tensor,
    ssm_state: Tensor,
    recent: Tensor,
    began: Tensor,
    rows: Rows,
    rounds: int = 0,
) -> Tensor:
    """mamba_step, but that ssm_state is written only where a row comes to a multiple of L tokens -> [R, inner].

    The other tokens wait in recent [slots, L - 1, inner + groups N + heads]: x and B after the convolution, and the raw
    time step. A row with `past` tokens finds the state of the first held = max(began[slot], past // L * L) of them in
    its slot, and the others in the first past - held places. (Inputs are small and states are large: ReplaySSM's idea.)
    """
    assert rows.slots is not None
    slots, past, waiting = rows.slots.long(), rows.past.long(), recent.shape[1]
    z, x, B, C, dt = _convolved(projected, conv_weight, conv_bias, len(A_log), len(norm_weight), conv_state, rows)
    held = torch.maximum(began[slots].long(), past // (waiting + 1) * (waiting + 1))
    state = ssm_state[slots].masked_fill((held == 0)[:, None, None, None], 0).float()
    recurrence = A_log, dt_bias, dt_limit, groups
    for i in range(waiting):
        state = _recalled(state, recent[slots, i], past - held > i, *recurrence)
    state = _moved(state, x, dt, B, *recurrence)
    written = (past + 1) % (waiting + 1) == 0
    kept = written[:, None, None, None]
    ssm_state[slots] = torch.where(kept, _stored(state, ssm_state.dtype, A_log, rows.past, rounds), ssm_state[slots])
    if waiting:
        place = (past - held).clamp(max=waiting - 1)
        entry = torch.cat([x, B, dt], 1).to(recent.dtype)
        recent[slots, place] = torch.where(written[:, None], recent[slots, place], entry)
    return _read(state, x, C, D, z, norm_weight, groups, eps)


def mamba_fold(
    A_log: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    groups: int,
    ssm_state: Tensor,
    recent: Tensor,
    slots: Tensor,
    held: Tensor,
    counts: Tensor,
    rounds: int = 0,
) -> None:
    """Move the states of slots (int [R]) over the first counts (int [R]) tokens that mamba_lazy_step left in `recent`.

    held (int [R]) is how many tokens are in the states before. A state is rounded once, as at the last of the tokens.
    """
    state = ssm_state[slots].masked_fill((held == 0)[:, None, None, None], 0).float()
    for i in range(recent.shape[1]):
        state = _recalled(state, recent[slots, i], counts > i, A_log, dt_bias, dt_limit, groups)
    moved = _stored(state, ssm_state.dtype, A_log, held + counts - 1, rounds)
    ssm_state[slots] = torch.where((counts > 0)[:, None, None, None], moved, ssm_state[slots])


def _convolved(
    projected: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    heads: int,
    inner: int,
    conv_state: Tensor,
    rows: Rows,
) -> tuple[Tensor, ...]:
    """z, x, B, C and dt of rows of one token, [R, ...]; the windows move on."""
    channels = projected.shape[1] - inner - heads
    z, xBC, dt = projected.split([inner, channels, heads], dim=-1)
    xBC = causal_conv(xBC, weight, bias, conv_state, rows)
    width = (channels - inner) // 2
    x, B, C = xBC.split([inner, width, width], dim=-1)
    return z, x, B, C, dt


def _moved(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    groups: int,
) -> Tensor:
    """fp32 states [R, heads, dim, N] after one more token of each row."""
    delta = _time_step(dt, dt_bias, dt_limit)
    decay = (delta * -A_log.exp())[..., None, None]
    x, B = x.float().unflatten(-1, (len(A_log), -1)), _of_heads(B, groups, len(A_log))
    return decay.exp() * state + (delta[..., None] * x)[..., None] * B[:, :, None]


def _recalled(
    state: Tensor,
    entry: Tensor,
    counts: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    groups: int,
) -> Tensor:
    """The same over a token that waited (entry [R, ...]), where it counts (bool [R])."""
    _, heads, dim, n = state.shape
    x, B, dt = entry.split([heads * dim, groups * n, heads], dim=-1)
    return torch.where(counts[:, None, None, None], _moved(state, x, dt, B, A_log, dt_bias, dt_limit, groups), state)


def _read(
    state: Tensor, x: Tensor, C: Tensor, D: Tensor, z: Tensor, norm_weight: Tensor, groups: int, eps: float
) -> Tensor:
    """What a token of each row reads from the state after it, gated and normalised -> [R, inner]."""
    heads = len(D)
    y = (state @ _of_heads(C, groups, heads)[..., None])[..., 0] + D[:, None] * x.float().unflatten(-1, (heads, -1))
    return gated_norm(y.flatten(1).to(z.dtype), z, norm_weight, groups, eps)


def _of_heads(values: Tensor, groups: int, heads: int) -> Tensor:
    """[R, groups N] -> fp32 [R, heads, N]"""
    return values.float().unflatten(-1, (groups, -1)).repeat_interleave(heads // groups, dim=1)


def at_random(state: Tensor, A_log: Tensor, position: Tensor, rounds: int) -> Tensor:
    """fp32 [R, heads, dim, N] -> fp16, up or down at random, so that what steps add is not lost below the last bit.

    13 random bits are added to the 13 that fp16 has not, which are cut off then; what is too large becomes the largest
    number, and below fp16's normal numbers the cut is made further up. One call of Philox serves eight rows of a head's
    state, 8 q to 8 q + 7, at one n: row 8 q + k takes word k // 2, its bits 0 to 12 if k is even and 16 to 28 if not.
    The counter is ((head * ceil(dim / 8) + q) * N + n, 0, 0, 0); the key has the fp32 bits of the head's A_log, which
    stand for the layer, below and the position (int [R]) above. With fewer than five `rounds` neighbours are not
    independent of each other.
    """
    count, heads, dim, n = state.shape
    layer = A_log.float().view(torch.int32).long()[:, None, None] & 0xFFFFFFFF
    key = layer | position.long()[:, None, None, None] << 32  # [R, heads, 1, 1]
    group = torch.arange(heads * -(-dim // 8) * n, device=state.device).view(heads, -1, n).expand(count, -1, -1, -1)
    zero = torch.zeros_like(group)
    words = torch.stack(philox(group, zero, zero, zero, key, rounds), 3)
    noise = (torch.stack((words, words >> 16), 4) & 0x1FFF).flatten(2, 4)[:, :, :dim]
    near = (state.view(torch.int32).long() + noise).clamp(-(2**31), 2**31 - 1).to(torch.int32).view(torch.float32)
    normal = (near.view(torch.int32) & ~0x1FFF).view(torch.float32).clamp(-65504, 65504)
    return torch.where(near.abs() < 2.0**-14, (near * 2.0**24).trunc() * 2.0**-24, normal).half()


def _stored(state: Tensor, dtype: torch.dtype, A_log: Tensor, position: Tensor, rounds: int) -> Tensor:
    return at_random(state, A_log, position, rounds) if rounds and dtype == torch.float16 else state.to(dtype)


def mamba_verify(
    projected: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    norm_weight: Tensor,
    groups: int,
    eps: float,
    conv_state: Tensor,
    ssm_state: Tensor,
    ring: Tensor,
    rows: Rows,
) -> Tensor:
    """Rows of a few tokens, some of them guesses -> [T, inner]; the states stay where they are.

    The arguments are those of mamba_step, for rows of up to W tokens. What would have moved the states goes into
    ring [slots, W, C + heads] instead: the inputs of the convolution and the raw time steps, from which mamba_replay
    moves them over the tokens that turn out right. (Inputs are small and states are large: the idea of ReplaySSM.)
    """
    assert rows.slots is not None
    inner, heads = len(norm_weight), len(A_log)
    z, inputs = projected.split([inner, projected.shape[1] - inner], dim=-1)
    own = replace(rows, slots=torch.arange(len(rows.lens), device=projected.device))
    states = conv_state[rows.slots], ssm_state[rows.slots]  # copies
    y = _mixed(inputs, conv_weight, conv_bias, A_log, D, dt_bias, dt_limit, groups, heads, *states, own)
    lens = torch.tensor(rows.lens, device=projected.device)
    row = torch.repeat_interleave(torch.arange(len(rows.lens), device=projected.device), lens)
    ring[rows.slots[row], torch.arange(len(row), device=projected.device) - rows.starts[row]] = inputs
    return gated_norm(y.flatten(1), z, norm_weight, groups, eps)


def mamba_replay(
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    groups: int,
    conv_state: Tensor,
    ssm_state: Tensor,
    ring: Tensor,
    slots: Tensor,
    past: Tensor,
    counts: Tensor,
    rounds: int = 0,
) -> None:
    """Move both states of slots (int [R]) over the first counts (int [R]) tokens that mamba_verify left in the ring.

    past (int [R]) is what the sequences had before those tokens. A state is rounded once, as in mamba_step at the last
    of them. Reads `counts` on the host: on CUDA it waits.
    """
    lens = counts.tolist()
    inputs = torch.cat([ring[slot, :n] for slot, n in zip(slots.tolist(), lens, strict=True)])
    moved = [i for i, n in enumerate(lens) if n]
    if moved:
        starts = torch.tensor([0, *accumulate(lens[i] for i in moved)], dtype=torch.int32, device=ring.device)
        at, before = slots[moved], past[moved]
        own = torch.arange(len(moved), device=ring.device)
        rows = Rows(tuple(lens[i] for i in moved), starts, before, own)
        states = conv_state[at], ssm_state[at].float()  # copies
        _mixed(inputs, conv_weight, conv_bias, A_log, D, dt_bias, dt_limit, groups, len(A_log), *states, rows)
        last = before + counts[moved] - 1
        conv_state[at], ssm_state[at] = states[0], _stored(states[1], ssm_state.dtype, A_log, last, rounds)


def _mixed(
    inputs: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    groups: int,
    heads: int,
    conv_state: Tensor,
    ssm_state: Tensor,
    rows: Rows,
) -> Tensor:
    """Convolution and scan of [xBC, dt] -> y [T, heads, dim]; both states move to the end of the rows."""
    channels = inputs.shape[1] - heads
    width = groups * ssm_state.shape[-1]
    xBC, dt = inputs.split([channels, heads], dim=-1)
    xBC = causal_conv(xBC, conv_weight, conv_bias, conv_state, rows)
    x, B, C = xBC.split([channels - 2 * width, width, width], dim=-1)
    x, B, C = x.unflatten(-1, (heads, -1)), B.unflatten(-1, (groups, -1)), C.unflatten(-1, (groups, -1))
    return ssd_scan(x, dt, B, C, A_log, D, dt_bias, dt_limit, max(rows.lens), ssm_state, rows)


def _time_step(dt: Tensor, dt_bias: Tensor, limit: tuple[float, float]) -> Tensor:
    """softplus(dt + bias) within the limits, fp32; softplus is the identity above 20."""
    return F.softplus(dt.float() + dt_bias).clamp(*limit)


def _initial(state: Tensor, rows: Rows) -> Tensor:
    """Each row's state before its first token [R, ...]: what its slot holds, zero if nothing is past."""
    fresh = (rows.past == 0).view(-1, *[1] * (state.dim() - 1))
    return state[rows.slots].masked_fill(fresh, 0)


class _Grid:
    """Rows cut into chunks and laid out as [chunks, chunk size, ...], zeros where a row's last chunk is not full.

    The first chunks of all rows come first, then the second chunks, and so on, rows with more chunks before rows with
    fewer: the rows that still have a j-th chunk are always the first few, so carry() walks over j with plain slices.
    """

    def __init__(self, rows: Rows, chunk: int, device: torch.device):
        self.size = size = min(chunk, max(rows.lens))
        counts = [-(-n // size) for n in rows.lens]
        order = sorted(range(len(counts)), key=lambda row: -counts[row])
        self.active = [sum(count > j for count in counts) for j in range(max(counts))]  # rows that have a j-th chunk
        offsets = [0, *accumulate(self.active)]  # the first of the j-th chunks
        place = {row: i for i, row in enumerate(order)}
        cells = [
            (offsets[j] + place[row]) * size + torch.arange(min(size, n - j * size))
            for row, n in enumerate(rows.lens)
            for j in range(counts[row])
        ]
        self.cells = torch.cat(cells).to(device)  # grid cell of every token
        self.order = torch.tensor(order, device=device)  # rows, the one with most chunks first
        self.chunks = offsets[-1]

    def lay(self, x: Tensor) -> Tensor:
        """[T, ...] -> [chunks, chunk size, ...]"""
        flat = x.new_zeros(self.chunks * self.size, *x.shape[1:])
        return flat.index_copy(0, self.cells, x).unflatten(0, (self.chunks, self.size))

    def take(self, grid: Tensor) -> Tensor:
        """[chunks, chunk size, ...] -> [T, ...]"""
        return grid.flatten(0, 1)[self.cells]

    def carry(self, state: Tensor, decay: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """S = decay S + added, over the chunks of each row -> (S before each chunk [chunks, ...], S after each row).

        state [R, ...]: S before each row; decay [chunks, ..., 1, 1] and added [chunks, ...]: of each chunk.
        """
        state = state[self.order]
        entering: list[Tensor] = []
        ended: list[Tensor] = []
        for first, count in zip(accumulate(self.active, initial=0), self.active, strict=False):
            ended.append(state[count:])
            entering.append(state[:count])
            state = decay[first : first + count] * state[:count] + added[first : first + count]
        final = torch.cat([state, *reversed(ended)])  # the longest rows end last
        return torch.cat(entering), final[self.order.argsort()]
