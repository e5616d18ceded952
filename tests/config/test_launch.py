"""From flags to configurations: what is passed on, what is only told, what is refused."""

import shlex
from pathlib import Path

import pytest

from leyden.config.engine import EngineConfig
from leyden.config.flags import table
from leyden.config.launch import Launch
from leyden.config.speculative import SpeculativeConfig
from leyden.errors import ConfigError

COMMANDS = (Path(__file__).parent.parent / "data/launch_commands.txt").read_text()
FLAGS = table()[1]


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch):
    for name in ("VLLM_API_KEY", "VLLM_LOGGING_LEVEL"):
        monkeypatch.delenv(name, raising=False)


def launch(*argv: str) -> Launch:
    return Launch.from_argv(["model", *argv])


def notes(*argv: str, device: str = "cpu") -> list[str]:
    return launch(*argv).notes(device)


def test_weights_are_not_stored_in_a_way_that_nobody_knows():
    with pytest.raises(ConfigError, match="--quantization: expected one of compressed-tensors, fp8, .*, got 'int3'"):
        Launch.from_argv(["m", "--quantization", "int3"])


def test_fields():
    made = launch(
        *("--served-model-name", "a", "b", "--port", "9000", "--api-key", "k"),
        *("--max-num-seqs", "8", "--max-model-len", "8k", "--dtype", "float32", "--seed", "3"),
        *("--hf-overrides", '{"x": 1}', "--disable-access-log-for-endpoints", "/health,/metrics"),
        *("--allowed-origins", '["http://a"]', "--sse-keep-alive-interval", "3", "--tokenizer", "t"),
    )
    engine, server = made.engine, made.server
    assert (engine.model, engine.max_num_seqs, engine.max_model_len, engine.seed) == ("model", 8, 8000, 3)
    assert (engine.dtype, engine.hf_overrides) == ("float32", {"x": 1})
    assert (server.served_model_name, server.port, server.api_key) == (("a", "b"), 9000, ("k",))
    assert server.disable_access_log_for_endpoints == ("/health", "/metrics")
    assert (server.allowed_origins, server.ping_interval) == (("http://a",), 3.0)
    assert made.engine.tokenizer == "t" and made.engine.speculative is None
    assert made.warnings == () and made.notes("cpu") == []


def test_thinking_and_grammars():
    server = launch(
        *("--default-thinking-budget", "500", "--default-thinking-grace", "30", "--tool-strict-level", "function"),
        *("--reasoning-config.reasoning_end_str", " Enough.", "--structured-outputs-config", '{"backend": "guidance"}'),
    ).server
    assert (server.default_thinking_budget, server.default_thinking_grace) == (500, 30)
    assert (server.tool_strict_level, server.reasoning_config) == ("function", {"reasoning_end_str": " Enough."})
    assert server.structured_outputs_config == {"backend": "guidance"}


def test_nothing_given_changes_nothing():
    assert launch().engine == Launch.from_argv(["--model", "model"]).engine
    assert launch("--max-model-len", "auto").engine.max_model_len is None
    assert launch("--kv-cache-dtype", "fp8_e5m2").engine.kv_cache_dtype == "auto"
    assert launch("--reasoning-parser", "").server == launch().server


def test_model_of_the_command_line_or_of_the_file(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("model: other\n")
    assert Launch.from_argv(["--config", str(file)]).engine.model == "other"
    assert launch("--config", str(file)).engine.model == "model"
    with pytest.raises(ConfigError, match="unrecognised argument model"):
        launch("--model", "other")


def test_speculative():
    made = launch("--speculative-config.method", "nemotron_h_mtp", "--spec-tokens", "3").engine.speculative
    assert made == SpeculativeConfig(method="mtp", num_speculative_tokens=3)
    assert launch("--spec-model", "d").engine.speculative == SpeculativeConfig(model="d")
    lines = notes("--speculative-config", '{"method": "mtp", "moe_backend": "triton"}')
    assert "--speculative-config.moe_backend triton has no effect: kernels are" in lines[-1]
    with pytest.raises(ConfigError, match=r"--spec-tokens and --speculative-config.num_speculative_tokens"):
        launch("--speculative-config.num_speculative_tokens", "2", "--spec-tokens", "3")
    with pytest.raises(ConfigError, match="expected a JSON object, got 3"):
        launch("--speculative-config", "3")


def test_rounding_of_states():
    """The words of the published recipes; the flag of the rounds alone rounds nothing."""
    asked = ("--mamba-ssm-cache-dtype", "float16", "--enable-mamba-cache-stochastic-rounding")
    made = launch(*asked, "--mamba-cache-philox-rounds", "5")
    assert made.engine.mamba_cache_philox_rounds == made.engine.state_rounds == 5 and not made.notes("cuda")
    assert launch(*asked).engine.state_rounds == 10
    assert launch("--mamba-cache-philox-rounds", "5").engine.state_rounds == 0


def test_prompts_in_8_bits():
    assert launch().engine.prefill_dtype == launch("--prefill-dtype", "auto").engine.prefill_dtype == "auto"
    assert launch("--prefill-dtype", "fp8").engine.prefill_dtype == "fp8" and notes("--prefill-dtype", "fp8") == []
    with pytest.raises(ConfigError, match="--prefill-dtype: expected one of auto, fp8, got 'int8'"):
        launch("--prefill-dtype", "int8")
    with pytest.raises(ConfigError, match="--prefill-dtype must be auto or fp8, got 'e4m3'"):
        EngineConfig(model="m", prefill_dtype="e4m3")


def test_states_that_are_written_now_and_then():
    made = launch("--use-replayssm", "--replayssm-buffer-len", "8")
    assert made.engine.state_period == 8 and not made.notes("cuda")
    assert made.notes("cpu") == ["--use-replayssm has no effect on a CPU: only kernels for CUDA can do that"]
    assert (
        launch("--replayssm-buffer-len", "8").engine.state_period
        == launch("--no-use-replayssm").engine.state_period
        == 1
    )


def test_environment(monkeypatch: pytest.MonkeyPatch):
    made = launch("--hf-token", "t", "--download-dir", "d", "--device-ids", "0,2")
    assert made.environment == {"HF_TOKEN": "t", "HF_HUB_CACHE": "d", "CUDA_VISIBLE_DEVICES": "0,2"}
    assert launch("--hf-token").environment == {}
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "debug")
    assert (launch().server.api_key, launch().log_level) == (("secret",), "DEBUG")
    assert launch("--api-key", "k", "--log-level", "error").server.api_key == ("k",)
    assert launch("--log-level", "error").log_level == "ERROR"
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "loud")
    with pytest.raises(ConfigError, match="VLLM_LOGGING_LEVEL: expected one of .*, got 'loud'"):
        launch()


def test_one_line_for_each_flag_without_effect():
    lines = notes("--trust-remote-code", "--moe-backend", "marlin", "-cc.mode", "3")
    assert [line.split(" has no effect")[0] for line in lines] == [
        "--trust-remote-code",
        "--moe-backend marlin",
        '--compilation-config {"mode": 3}',
    ]
    assert all(line.count("\n") == 0 and len(line) < 200 for line in lines)
    assert notes("--moe-backend", "auto", "--mamba-cache-mode", "none", "--runner", "generate") == []
    assert notes("--no-enable-prefix-caching", "--enable-chunked-prefill") == []
    assert notes("--swap-space", "4") == [
        "--swap-space 4.0 has no effect: --kv-offloading-size sizes the host memory of the cache"
    ]


def test_backends_that_have_an_effect_are_told_from_those_that_have_none():
    argv = [
        "--mamba-backend",
        "FlashInfer",
        "--mamba-ssu-algorithm",
        "horizontal",
        "--moe-backend",
        "flashinfer-cutlass",
    ]
    engine = launch(*argv, "--linear-backend", "humming").engine
    assert (engine.mamba_backend, engine.mamba_ssu_algorithm) == ("flashinfer", "horizontal")
    assert (engine.moe_backend, engine.linear_backend) == ("flashinfer_cutlass", "humming")
    assert notes(*argv, "--linear-backend", "humming", device="cuda") == []
    lines = notes(*argv, device="cpu")
    assert len(lines) == 3 and all(
        line.endswith(" has no effect on a CPU: leyden's own kernels for CPUs run") for line in lines
    )
    engine = launch("--mamba-backend", "cpu", "--moe-backend", "marlin", "--linear-backend", "machete").engine
    assert (engine.mamba_backend, engine.moe_backend, engine.linear_backend) == ("triton", "auto", "auto")


def test_backends_in_an_object():
    argv = ["--kernel-config", '{"moe_backend": "humming", "linear_backend": "marlin"}']
    engine = launch(*argv).engine
    assert (engine.moe_backend, engine.linear_backend) == ("humming", "auto")
    (line,) = notes(*argv, device="cuda")
    assert line.startswith('--kernel-config {"linear_backend": "marlin"} has no effect: ')
    assert notes("--kernel-config.moe_backend", "humming", device="cuda") == []
    assert "has no effect" in notes("--kernel-config.moe_backend", "humming", device="cpu")[0]
    assert launch(*argv, "--moe-backend", "auto").engine.moe_backend == "auto"
    with pytest.raises(ConfigError, match="--moe-backend: expected one of .*, got 'nope'"):
        launch("--kernel-config.moe_backend", "nope")


def test_reasons_name_work_to_come():
    (line,) = notes("--sleep-mode-offload-cudagraph")
    assert line.startswith("--sleep-mode-offload-cudagraph has no effect yet: ")
    with pytest.raises(ConfigError, match="^--tensor-parallel-size 2 is not possible yet: one GPU$"):
        launch("-tp", "2")


def test_devices_differ():
    argv = ["--gpu-memory-utilization", "0.5", "--async-scheduling", "--device-ids", "0"]
    assert notes(*argv, device="cuda") == []
    assert {line.split(" has no effect on a CPU: ")[0] for line in notes(*argv, device="cpu")} == {
        "--device-ids [0]",
        "--async-scheduling",
        "--gpu-memory-utilization 0.5",
    }
    assert notes("--no-async-scheduling", "--gpu-memory-utilization", "0.92") == []


def test_graphs_have_the_sizes_that_are_asked_for():
    argv = ["serve", "model", "--compilation_config.cudagraph_capture_sizes", "[4, 1, 64]"]
    config = Launch.from_argv(argv[1:]).engine
    assert config.capture_sizes == (1, 4, 64)
    assert notes(*argv[2:], device="cuda") == []
    assert "has no effect" in notes(*argv[2:], device="cpu")[0]
    assert Launch.from_argv(["model", "--max-cudagraph-capture-size", "3"]).engine.capture_sizes == (1, 2, 3)
    assert Launch.from_argv(["model", "--enforce-eager"]).engine.capture_sizes == ()
    with pytest.raises(ConfigError, match="from 1 on"):
        Launch.from_argv(["model", "--cudagraph-capture-sizes", "0", "1"])


def test_long_values_are_cut():
    (line,) = notes("--compilation_config.cudagraph_capture_sizes", str(list(range(1, 100))))
    assert line.startswith('--compilation-config {"cudagraph_capture_sizes": [1, 2, ') and "... has no effect" in line


SAMPLE = {"int": "7", "size": "7", "float": "0.7", "object": '{"a": 1}', "json": '{"a": 1}', "pairs": "a=b"}


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.treatment == "refuse"], ids=lambda flag: flag.dest)
def test_refused_by_name(flag):
    other = [choice for choice in flag.choices if choice not in (flag.default, *flag.accepts)]
    values = [] if flag.type == "switch" else [str(other[0]) if other else SAMPLE.get(flag.type, "x")]
    with pytest.raises(ConfigError) as caught:
        launch(flag.name, *values)
    assert str(caught.value).startswith(flag.name) and "not possible" in str(caught.value)
    if flag.default not in (None, []) and flag.type != "switch":
        assert launch(flag.name, str(flag.default)).notes("cpu") == []


def test_checks_after_parsing(tmp_path: Path):
    assert launch("--enable-auto-tool-choice").notes("cpu") == []
    assert launch("--tool-call-parser", "qwen3_xml").server.tool_call_parser == "qwen3_xml"
    assert launch("--chat-template", "{{ messages }}").server.chat_template == "{{ messages }}"
    file = tmp_path / "t.jinja"
    file.write_text("x")
    assert launch("--chat-template", str(file)).server.chat_template == str(file)
    with pytest.raises(ConfigError, match="--chat-template: no such file"):
        launch("--chat-template", "missing.jinja")
    with pytest.raises(ConfigError, match="--enable-log-outputs needs --enable-log-requests"):
        launch("--enable-log-outputs")
    assert launch("--enable-log-outputs", "--enable-log-requests").server.enable_log_outputs
    both = launch("--enable-per-request-metrics", "--disable-log-stats").server
    assert both.enable_per_request_metrics and both.disable_log_stats
    for flag in ("--reasoning-parser", "--tool-call-parser"):
        with pytest.raises(ConfigError, match=f"{flag}: expected one of .*, got 'nope'"):
            launch(flag, "nope")
    with pytest.raises(ConfigError, match="--allowed-origins: expected a list"):
        launch("--allowed-origins", '"http://a"')
    with pytest.raises(ConfigError, match="--max-num-seqs must be at least 1"):
        launch("--max-num-seqs", "0")


def commands() -> dict[str, list[str]]:
    """The published commands of this model family, by name; `vllm serve` taken away."""
    blocks = [block.strip().split("\n", 1) for block in COMMANDS.strip().split("\n\n")]
    return {name.lstrip("# "): shlex.split(text.replace("\\\n", " "))[2:] for name, text in blocks}


@pytest.mark.parametrize("name", commands())
def test_published_commands(name: str, tmp_path: Path):
    argv = [str(tmp_path) if word.startswith("nvidia/") else word for word in commands()[name]]
    made = Launch.from_argv(argv)
    assert made.engine.model == str(tmp_path) and made.warnings == ()
    for device in ("cpu", "cuda"):
        lines = made.notes(device)
        assert len({line.split()[0] for line in lines}) == len(lines)  # one line per flag
    assert (made.engine.speculative is not None) == ("speculative_config" in " ".join(argv))
    assert made.server.reasoning_parser == "nemotron_v3"
    if "--max-num-seqs" in argv:
        assert (made.engine.max_num_seqs, made.engine.max_num_batched_tokens) == (256, 32768)
        assert made.engine.mamba_ssm_cache_dtype == "float16"
