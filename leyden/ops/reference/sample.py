"""From logits to a token: the references of the sampler's ops.

Randomness is counter-based: the uniform of (seed, position, token id) is one word of Philox 4x32-10, so a request with
a seed gets the same tokens whatever shares its batch and however its steps are cut.
"""

import torch
from torch import Tensor

from leyden.ops.reference.philox import philox


def uniform(seed: Tensor, position: Tensor, ids: Tensor) -> Tensor:
    """Uniforms in (0, 1), fp32 [R, N], from seed int64 [R], position int64 [R] and token ids int64 [R, N].

    Philox 4x32 with 10 rounds: key = the 64 bits of the seed, counter = (id // 4, position, 0, 0); word id % 4 of the
    result, its upper 23 bits plus a half.
    """
    zero = torch.zeros_like(ids)
    words = philox(ids >> 2, position[:, None].expand_as(ids), zero, zero, seed[:, None], 10)
    word = torch.stack(words, -1).gather(-1, (ids & 3)[..., None])[..., 0]
    return ((word >> 9).float() + 0.5) * 2.0**-23


def penalize(
    logits: Tensor, counts: Tensor, seen: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> Tensor:
    """Penalised logits, fp32 [R, V].

    counts  int [R, V]: how often each token was generated; seen bool [R, V]: whether it is in prompt or output
    presence, frequency, repetition  fp32 [R]

    repetition divides positive and multiplies negative logits of seen tokens (CTRL, arXiv 1909.05858); then
    logits -= frequency * counts + presence * (counts > 0), as the OpenAI API defines them.
    """
    factor = torch.where(seen, repetition[:, None], 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, position: Tensor
) -> Tensor:
    """One token id per row, int64 [R], from logits fp32 [R, V] and one value per row of everything else.

    temperature below 1e-5 takes the most likely token, lowest id first. Otherwise the order is temperature, min_p,
    top_k (below 1: off), top_p over what top_k left; then the Gumbel trick: arg-max of z + G with G = -log(-log u),
    which draws from softmax(z) over the tokens that are left. `position` is that of the token to be sampled.
    """
    out = logits.argmax(-1)
    drawn = (temperature >= 1e-5).nonzero()[:, 0]
    if len(drawn):
        parameters = (value[drawn] for value in (temperature, top_k, top_p, min_p, seed, position))
        out[drawn] = _draw(logits[drawn], *parameters)
    return out


def _draw(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, position: Tensor
) -> Tensor:
    z = logits / temperature[:, None]
    z = z.masked_fill(z < z.amax(-1, keepdim=True) + min_p[:, None].log(), float("-inf"))
    ids = torch.arange(z.shape[-1], device=z.device).expand_as(z)
    if bool(((top_k > 0) | (top_p < 1)).any()):
        z, ids = z.sort(dim=-1, descending=True, stable=True)  # stable: equal logits stay in the order of their ids
        rank = torch.arange(z.shape[-1], device=z.device)
        limit = torch.where(top_k > 0, top_k, z.shape[-1])
        z = z.masked_fill(rank >= limit[:, None], float("-inf"))
        p = z.softmax(-1)
        # mass of everything more likely: the token that crosses top_p is kept, and so is the first
        z = z.masked_fill((p.cumsum(-1) - p) >= top_p[:, None], float("-inf"))
        width = int((z > float("-inf")).sum(-1).max())
        z, ids = z[:, :width], ids[:, :width]
    gumbel = -torch.log(-torch.log(uniform(seed, position, ids)))
    return ids.gather(-1, (z + gumbel).argmax(-1, keepdim=True))[:, 0]


def logprobs(logits: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of `ids` (int64 [R]) and of the k most likely tokens under softmax(logits), logits fp32 [R, V].

    Returns (fp32 [R], rank int64 [R] with 1 = most likely, top ids int64 [R, k], top fp32 [R, k]).
    """
    logp = logits.log_softmax(-1)
    own = logp.gather(-1, ids[:, None])
    rank = (logp > own).sum(-1) + 1
    top, top_ids = logp.topk(k, -1)
    return own[:, 0], rank, top_ids, top
