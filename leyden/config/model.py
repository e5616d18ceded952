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
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    intermediate_sizes: tuple[int, ...] = ()  # one per "-" layer
    mamba_num_heads: int = 128
    mamba_head_dim: int = 64
    n_groups: int = 8
    ssm_state_size: int = 128
    conv_kernel: int = 4
    use_conv_bias: bool = True
    chunk_size: int = 128
    time_step_limit: tuple[float, float] = (0.0, float("inf"))
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = False
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 7688
    shared_expert_width: int = 0  # 0: no shared expert
    moe_latent_size: int | None = None
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    num_nextn_predict_layers: int = 0
    mtp_pattern: str = "*E"
    dtype: str = "bfloat16"

    @property
    def mamba_inner(self) -> int:
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def conv_dim(self) -> int:
        return self.mamba_inner + 2 * self.n_groups * self.ssm_state_size
