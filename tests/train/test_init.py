import pytest
import torch

from leyden.errors import ConfigError
from leyden.formats import Weight
from leyden.model.nemotron import Nemotron
from leyden.train.init import initialize
from tests.train.examples import CONFIG, model


def test_the_same_seed_gives_the_same_weights_in_any_dtype() -> None:
    a, b, c, other = (dict(m.named_parameters()) for m in (model(), model(), model(dtype=torch.bfloat16), model(1)))
    for name, weight in a.items():
        assert torch.equal(weight, b[name])
        assert torch.equal(weight.to(c[name].dtype), c[name])
    assert not torch.equal(a["lm_head.weight"], other["lm_head.weight"])


def test_values_are_those_of_the_recipe() -> None:
    found = dict(model().named_parameters())
    for name, weight in found.items():
        mean, std = float(weight.detach().mean()), float(weight.detach().std())
        if name.endswith(("norm.weight", "norm_f.weight", "final_layernorm.weight", ".D")):
            assert (weight == 1).all(), name
        elif name.endswith("A_log"):
            assert ((weight.exp() >= 1) & (weight.exp() <= 16)).all()
        elif name.endswith("dt_bias"):
            dt = torch.nn.functional.softplus(weight)
            assert ((dt > 0.99e-3) & (dt < 0.101)).all()
        elif name.endswith("bias"):
            assert (weight == 0).all(), name
        elif name.endswith("_proj.weight"):
            out = name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight"))
            wanted = weight.shape[-1] ** -0.5 * (len(CONFIG.pattern) ** -0.5 if out else 1)
            assert std == pytest.approx(wanted, rel=0.15) and abs(mean) < wanted / 5, name


def test_what_has_no_recipe_is_refused() -> None:
    net = Nemotron(CONFIG, torch.float32)
    net.backbone.novelty = Weight(2, 2, dtype=torch.float32)
    with pytest.raises(ConfigError, match="backbone.novelty.weight"):
        initialize(net, 0)
