"""AdamW, Muon, and the learning rate's course. Weights are kept in fp32, whatever dtype the model computes in."""

from collections import defaultdict
from collections.abc import Iterable
from math import cos, pi

import torch
from torch import Tensor, nn

_BETA1, _BETA2, _EPS = 0.9, 0.95, 1e-8
_MOMENTUM = 0.95  # of Muon


def cosine(step: int, steps: int, warmup: int, floor: float) -> float:
    """Factor of the learning rate at `step` (0 is the first): up in a line, down to `floor` in half a cosine."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return floor + (1 - floor) * (1 + cos(pi * min(1.0, done))) / 2


class Optimizer:
    """Updates the parameters of a model that require a gradient.

    AdamW (Loshchilov and Hutter 2019) with betas (0.9, 0.95); decay on matrices only, not on vectors and convolutions.
    With `muon`, the projections take Muon instead (Jordan et al. 2024), scaled as in "Muon is scalable for LLM
    training" (Liu et al. 2025) so that both share one learning rate and one decay.

    `weights` are the fp32 originals by parameter name; the model holds copies in its own dtype, or the originals
    themselves where its dtype is fp32.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], decay: float, muon: bool):
        self._parameters = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        self._decay = decay
        self.weights = {name: parameter.detach().float() for name, parameter in self._parameters.items()}
        projections = {name for name in self.weights if muon and name.endswith("_proj.weight")}
        self._adam = [name for name in self.weights if name not in projections]
        self._muon = defaultdict(list)  # shape -> names
        for name in self.weights:
            if name in projections:
                self._muon[self.weights[name].shape].append(name)
        self._first = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self._second = {name: torch.zeros_like(self.weights[name]) for name in self._adam}
        self._gradients: dict[str, Tensor] = {}

    def state(self) -> dict[str, Tensor]:
        """Everything that a later step depends on, by name; tensors that load() accepts and step() changes in place."""
        kinds = {"weight": self.weights, "first": self._first, "second": self._second}
        return {f"{kind}.{name}": tensor for kind, tensors in kinds.items() for name, tensor in tensors.items()}

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
        self._publish()

    @torch.no_grad()
    def accumulate(self) -> None:
        """Take over the gradients of a backward pass, adding to those of the passes since the last step in fp32."""
        for name, parameter in self._parameters.items():
            assert parameter.grad is not None, name
            gradient = parameter.grad.float()
            self._gradients[name] = self._gradients[name] + gradient if name in self._gradients else gradient
            parameter.grad = None

    @torch.no_grad()
    def step(self, number: int, rate: float, clip: float) -> Tensor:
        """Update number `number` (1 is the first) -> norm of the gradient before it was clipped to `clip`."""
        gradients = [self._gradients[name] for name in self.weights]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        torch._foreach_mul_(gradients, (clip / (norm + 1e-6)).clamp(max=1))
        matrices = [w for name, w in self.weights.items() if w.dim() > 1 and not name.endswith("conv1d.weight")]
        torch._foreach_mul_(matrices, 1 - rate * self._decay)
        self._step_adam(number, rate)
        for names in self._muon.values():
            self._step_muon(names, rate)
        self._gradients = {}
        self._publish()
        return norm

    def _step_adam(self, number: int, rate: float) -> None:
        gradients, first, second = (
            [of[name] for name in self._adam] for of in (self._gradients, self._first, self._second)
        )
        torch._foreach_lerp_(first, gradients, 1 - _BETA1)
        torch._foreach_mul_(second, _BETA2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - _BETA2)
        scale = torch._foreach_div(second, 1 - _BETA2**number)
        torch._foreach_sqrt_(scale)
        torch._foreach_add_(scale, _EPS)
        torch._foreach_addcdiv_([self.weights[n] for n in self._adam], first, scale, -rate / (1 - _BETA1**number))

    def _step_muon(self, names: list[str], rate: float) -> None:
        """Matrices [N, K] or stacks [E, N, K] of one shape: the nearest half-orthogonal matrix to each momentum."""
        gradients, first = ([of[name] for name in names] for of in (self._gradients, self._first))
        torch._foreach_mul_(first, _MOMENTUM)
        torch._foreach_add_(first, gradients)
        ahead = torch.stack(torch._foreach_add(gradients, first, alpha=_MOMENTUM))  # Nesterov's look ahead
        scale = 0.2 * max(ahead.shape[-2:]) ** 0.5  # an update's root mean square is then about Adam's
        updates = _orthogonal(ahead).to(ahead.dtype).unbind()
        torch._foreach_add_([self.weights[name] for name in names], updates, alpha=-rate * scale)

    def _publish(self) -> None:
        """Round the weights into the model."""
        pairs = [(p.data, self.weights[name]) for name, p in self._parameters.items() if p.dtype != torch.float32]
        if pairs:
            torch._foreach_copy_([p for p, _ in pairs], [weight for _, weight in pairs])


def _orthogonal(matrix: Tensor) -> Tensor:
    """U V^T of the singular value decomposition, roughly: five Newton-Schulz steps with Jordan's coefficients."""
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    if wide := x.shape[-2] > x.shape[-1]:
        x = x.mT
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.mT if wide else x
