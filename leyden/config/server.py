"""What the HTTP server is told about itself. Frozen; each field is the `leyden serve` flag of the same name."""

import ipaddress
from dataclasses import dataclass, field
from typing import Any

from leyden.errors import ConfigError

FINGERPRINT_MODES = ("full", "hash", "custom", "none")
REASONING_FIELDS = ("both", "reasoning", "reasoning_content")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Defaults are those of `vllm serve`, except where they were unsafe: the server listens on this machine only and
    lets no foreign web page in unless told otherwise."""

    # where it listens
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None  # a unix socket instead of host and port
    root_path: str = ""  # path prefix that a reverse proxy takes away
    allowed_hosts: tuple[str, ...] = ()  # Host headers to accept; empty: this machine's names, if it listens there only
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    ssl_ciphers: str | None = None

    # who may use it
    api_key: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()  # CORS
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    max_body_bytes: int = 64 << 20
    max_queued_requests: int | None = None  # beyond those that run; more are refused (429). None: no limit
    request_timeout: float = 0.0  # seconds that an answer may take; 0: no limit
    cache_salt_per_key: bool = False  # clients with different keys share nothing that is cached
    metrics_auth: bool = False  # /metrics needs a key too

    # what it serves
    served_model_name: tuple[str, ...] = ()  # the first one is the name in answers; empty: the model as it was given
    chat_template: str | None = None  # file or text instead of the checkpoint's
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    exclude_tools_when_tool_choice_none: bool = False
    reasoning_parser: str | None = "nemotron_v3"  # None: thinking is content
    tool_call_parser: str = "qwen3_coder"
    tool_strict_level: str | None = None  # function, parameter: enforced for all tools; None, auto: as the request says
    default_thinking_budget: int | None = None  # tokens of thinking where a request sets no limit; None: no limit
    default_thinking_grace: int = 0  # tokens beyond a budget in which a line may be ended
    reasoning_config: dict[str, Any] = field(default_factory=dict)  # reasoning_end_str: what is put in at a budget
    structured_outputs_config: dict[str, Any] = field(default_factory=dict)  # as in --help

    # how it answers
    response_role: str = "assistant"
    reasoning_field: str = "both"  # reasoning, reasoning_content, both
    return_tokens_as_token_ids: bool = False
    enable_force_include_usage: bool = False
    enable_server_load_tracking: bool = False
    enable_per_request_metrics: bool = False
    per_request_spec_decode_metrics: str = "none"  # summary: what became of drafts; detailed: of each step's
    fingerprint_mode: str = "full"
    fingerprint_value: str | None = None
    stream_interval: int = 1  # tokens of one stream chunk; the first and the last chunk never wait
    ping_interval: float = 15.0  # seconds of silence until a comment line keeps a stream open; 0: never
    shutdown_timeout: int = 0  # seconds that running requests get at the end

    # what it logs
    enable_log_requests: bool = False
    enable_log_outputs: bool = False
    max_log_len: int | None = None  # characters of a prompt or an answer
    log_error_stack: bool = False
    disable_log_stats: bool = False  # no line about the engine every ten seconds
    otlp_traces_endpoint: str | None = None  # where OpenTelemetry spans go
    uvicorn_log_level: str = "info"
    disable_uvicorn_access_log: bool = False
    disable_access_log_for_endpoints: tuple[str, ...] = ()
    disable_fastapi_docs: bool = False

    def __post_init__(self) -> None:
        for name, accepted in (("fingerprint_mode", FINGERPRINT_MODES), ("reasoning_field", REASONING_FIELDS)):
            if getattr(self, name) not in accepted:
                raise ConfigError(f"--{_flag(name)} must be one of {', '.join(accepted)}, got {getattr(self, name)!r}")
        for name, low, high in (
            ("port", 0, 65535),
            ("stream_interval", 1, None),
            ("shutdown_timeout", 0, None),
            ("ping_interval", 0, None),
            ("max_body_bytes", 1, None),
            ("default_thinking_grace", 0, None),
            ("max_queued_requests", 0, None),
            ("request_timeout", 0, None),
        ):
            value = getattr(self, name)
            if value is None:
                continue
            if value < low or (high is not None and value > high):
                wanted = f"at least {low}" if high is None else f"between {low} and {high}"
                raise ConfigError(f"--{_flag(name)} must be {wanted}, got {value}")
        if self.default_thinking_budget is not None and self.default_thinking_budget < 0:
            raise ConfigError(f"--default-thinking-budget must be at least 0, got {self.default_thinking_budget}")
        if not isinstance(end := self.reasoning_config.get("reasoning_end_str", ""), str):
            raise ConfigError(f"--reasoning-config: reasoning_end_str must be a text, got {end!r}")
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ConfigError("--ssl-keyfile and --ssl-certfile go together: give both or none")
        if self.fingerprint_mode == "custom" and not self.fingerprint_value:
            raise ConfigError("--fingerprint-mode custom needs --fingerprint-value")
        if self.cache_salt_per_key and not self.api_key:
            raise ConfigError("--cache-salt-per-key needs --api-key")
        if any(not key for key in self.api_key):
            raise ConfigError("--api-key must not be empty")

    @property
    def local(self) -> bool:
        """Whether only programs on this machine can reach the server."""
        if self.uds or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def _flag(name: str) -> str:
    return name.replace("_", "-")
