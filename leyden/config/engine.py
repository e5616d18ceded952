"""What an engine is told about itself. Frozen: derived values are properties, nothing is patched later."""

from dataclasses import dataclass, field
from typing import Any

from leyden.config import cores
from leyden.config.speculative import SpeculativeConfig
from leyden.errors import ConfigError

# Numbers in between are filled up with rows of the padding slot, which all choose the same experts.
CAPTURE_SIZES = (
    *range(1, 9),
    *range(10, 17, 2),
    *range(20, 33, 4),
    *range(40, 65, 8),
    *range(80, 257, 16),
    *range(288, 513, 32),
)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Each field is the `leyden serve` flag of the same name; None means "choose for this model and device"."""

    model: str  # folder of a checkpoint, or a Hugging Face id
    revision: str | None = None
    tokenizer: str | None = None  # folder of tokenizer and chat template; None: the model's
    device: str = "auto"  # cuda if there is one, else cpu
    threads: int | None = None  # that compute on the CPU; None: OMP_NUM_THREADS, or one for each processor
    cpu_affinity: str | None = None  # processors to keep to, such as 0-3,8
    dtype: str = "auto"  # of the activations: the checkpoint's, unless float32, bfloat16 or float16 is asked for
    load_format: str = "auto"  # auto, safetensors, dummy
    safetensors_load_strategy: str | None = None  # eager: read the files, and keep no image of the weights
    prefill_dtype: str = "auto"  # fp8: wide steps round the activations of products with FP8 and NVFP4 weights
    quantization: str | None = None  # int8, int4, nvfp4, fp8: round what the checkpoint holds dense while loading
    seed: int = 0
    max_model_len: int | None = None  # tokens of prompt and answer together
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_scheduled_tokens: int | None = None
    long_prefill_token_threshold: int = 0  # 0: no limit for one row
    max_num_partial_prefills: int = 0  # 0: no limit
    max_long_partial_prefills: int = 0
    performance_mode: str = "balanced"  # throughput: prompts take whole steps, whoever waits for a token
    enable_chunked_prefill: bool = True
    scheduling_policy: str = "fcfs"  # fcfs, priority
    async_scheduling: bool | None = None  # None: on for CUDA, off for CPU (nothing to overlap there)
    block_size: int = 16  # tokens of one KV page
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.92
    kv_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    enable_mamba_cache_stochastic_rounding: bool = False  # of fp16 states, where decode steps store them
    mamba_cache_philox_rounds: int = 0  # of its random bits; 0: 10
    use_replayssm: bool = False  # decode steps keep inputs, and write states only now and then
    replayssm_buffer_len: int = 16  # positions from one of these states to the next
    mamba_backend: str = "triton"  # flashinfer: that package's state update, on CUDA
    mamba_ssu_algorithm: str | None = None  # variant of that update; None: auto
    moe_backend: str = "auto"  # flashinfer_cutlass, humming: that package's products, on CUDA
    linear_backend: str = "auto"  # humming
    enable_prefix_caching: bool | None = None
    kv_offloading_size: float | None = None  # GiB of host memory for what leaves the device's cache
    cache_dir: str | None = None  # folder in which the cache outlives the process
    cache_save_interval: float = 0  # seconds between two savings while it runs; 0: only at the end
    max_logprobs: int = 20
    hf_overrides: dict[str, Any] = field(default_factory=dict)  # laid over config.json
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    cudagraph_capture_sizes: tuple[int, ...] = ()  # rows of a CUDA graph; none: CAPTURE_SIZES
    max_cudagraph_capture_size: int | None = None
    enforce_eager: bool = False  # no CUDA graphs
    speculative_config: dict[str, Any] = field(default_factory=dict)  # empty: no drafts; keys: SpeculativeConfig

    def __post_init__(self) -> None:
        for name in ("threads", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_num_scheduled_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if self.prefill_dtype not in ("auto", "fp8"):
            raise ConfigError(f"--prefill-dtype must be auto or fp8, got {self.prefill_dtype!r}")
        if self.cpu_affinity is not None:
            cores.parse(self.cpu_affinity)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"--gpu-memory-utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        for name in ("kv_offloading_size", "cache_save_interval"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"--{name.replace('_', '-')} must not be negative, got {getattr(self, name)}")
        if self.block_size < 1:
            raise ConfigError(f"--block-size must be at least 1, got {self.block_size}")
        if self.enable_mamba_cache_stochastic_rounding and self.mamba_ssm_cache_dtype != "float16":
            found = f"--mamba-ssm-cache-dtype {self.mamba_ssm_cache_dtype}"
            raise ConfigError(
                f"--enable-mamba-cache-stochastic-rounding needs --mamba-ssm-cache-dtype float16: {found}"
            )
        if self.mamba_cache_philox_rounds < 0:
            raise ConfigError(f"--mamba-cache-philox-rounds must not be negative, got {self.mamba_cache_philox_rounds}")
        if not 1 <= self.replayssm_buffer_len <= 32:
            raise ConfigError(f"--replayssm-buffer-len must be in 1..32, got {self.replayssm_buffer_len}")
        if self.use_replayssm and self.mamba_backend != "triton":
            backend = f"--mamba-backend {self.mamba_backend}"
            raise ConfigError(f"--use-replayssm has kernels of its own, which {backend} would replace; leave one away")
        if any(not isinstance(size, int) or size < 1 for size in self.cudagraph_capture_sizes):
            sizes = list(self.cudagraph_capture_sizes)
            raise ConfigError(f"--cudagraph-capture-sizes: expected whole numbers from 1 on, got {sizes}")
        _ = self.speculative

    @property
    def state_rounds(self) -> int:
        """Rounds of the random bits by which states are rounded where decode steps store them; 0: to nearest."""
        return (self.mamba_cache_philox_rounds or 10) if self.enable_mamba_cache_stochastic_rounding else 0

    @property
    def state_period(self) -> int:
        """Positions from one state that decode steps write to the next."""
        return self.replayssm_buffer_len if self.use_replayssm else 1

    @property
    def capture_sizes(self) -> tuple[int, ...]:
        """Rows of the CUDA graphs, ascending. Steps of more rows are run op by op."""
        sizes = () if self.enforce_eager else self.cudagraph_capture_sizes or CAPTURE_SIZES
        most = self.max_cudagraph_capture_size
        return tuple(sorted({size for size in sizes if most is None or size <= most}))

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """How drafts are made; None: they are not. What depends on the model is still open: settle() fills it in."""
        return SpeculativeConfig.from_dict(self.speculative_config) if self.speculative_config else None
