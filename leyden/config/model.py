"""The architecture, as config.json tells it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Names are those of config.json; `pattern` has one letter per layer: M mamba, * attention, E MoE, - dense MLP.

    The full reading of config.json (aliases, lists, refusals) is ModelConfig.from_dict.
    """

    vocab_size: int
    hidden_size: int
    pattern: str
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    mamba_num_heads: int
    mamba_head_dim: int
    n_groups: int
    ssm_state_size: int
    conv_kernel: int

    @property
    def mamba_inner(self) -> int:
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def conv_dim(self) -> int:
        return self.mamba_inner + 2 * self.n_groups * self.ssm_state_size
