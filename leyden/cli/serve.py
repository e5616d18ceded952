"""`leyden serve`: flags → configurations → engine process → HTTP server."""

import os
import socket
import ssl
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from leyden import __version__, log
from leyden.cli import help as pages
from leyden.config.engine import EngineConfig
from leyden.config.flags import table
from leyden.config.folder import resolve
from leyden.config.generation import GenerationDefaults
from leyden.config.launch import Launch
from leyden.config.server import ServerConfig
from leyden.errors import ConfigError

logger = log.get(__name__)

ABOUT = "Serves a Nemotron 3 model over HTTP, with the flags and the interface of vllm serve."
GIB = 2**30


def main(argv: Sequence[str]) -> int:
    """Serve until a signal or the engine's end; returns the exit code."""
    topic = pages.wanted(argv)
    if topic is not None:
        print(pages.page("leyden serve [MODEL] [FLAGS]", ABOUT, topic, *table()))
        return 0
    started = time.monotonic()
    launch = Launch.from_argv(argv)
    log.setup(launch.log_level, launch.log_format)
    for warning in launch.warnings:
        logger.warning(warning)
    os.environ.update(launch.environment)
    return run(launch, started)


def run(launch: Launch, started: float) -> int:
    """Load, say what came of it, serve. `started` is the time.monotonic() that the ready time counts from."""
    from leyden.server import app
    from leyden.server.client import EngineClient
    from leyden.server.process import OwnProcess
    from leyden.server.tracing import exporters
    from leyden.text.template import ChatTemplate
    from leyden.text.tokenizer import Tokenizer

    check_address(launch.server)
    if launch.server.otlp_traces_endpoint:
        exporters()  # better known now than after a minute of loading
    folder = resolve(launch.engine.model, launch.engine.revision)
    texts = resolve(launch.engine.tokenizer) if launch.engine.tokenizer else folder
    tokenizer = Tokenizer.from_folder(texts)
    given = launch.server.chat_template
    template = ChatTemplate(_read(given), tokenizer) if given else ChatTemplate.from_folder(texts, tokenizer)
    defaults = sampling_defaults(launch.engine, folder)

    config = asdict(replace(launch.engine, model=str(folder), tokenizer=str(texts)))
    factory = "leyden.server.process:load"
    link = OwnProcess(factory, config, log_level=launch.log_level, log_format=launch.log_format)
    for note in launch.notes(str(link.facts["device"]).partition(":")[0]):
        logger.warning(note)
    if os.environ.get("VLLM_DISABLE_LOG_LOGO") != "1":
        banner(launch, link.facts, time.monotonic() - started)

    client = EngineClient(link)
    model = launch.engine.model
    return app.serve(
        app.build(launch.server, client, tokenizer, template, model=model, defaults=defaults), launch.server, client
    )


def check_address(config: ServerConfig) -> None:
    """Whether a server can be at the address: better known now than after a minute of loading. Raises ConfigError."""
    if config.ssl_certfile:
        _check_certificates(config)
    if config.uds:
        folder = Path(config.uds).parent
        if not os.access(folder, os.W_OK):
            raise ConfigError(f"--uds {config.uds}: no socket can be made there, {folder} is no folder to write to")
        return
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        socket.create_server((config.host, config.port), family=family).close()
    except OSError as error:
        raise ConfigError(f"--host {config.host} --port {config.port}: {error.strerror or error}") from None


def _check_certificates(config: ServerConfig) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.ssl_certfile or "", config.ssl_keyfile)
        if config.ssl_ca_certs:
            context.load_verify_locations(config.ssl_ca_certs)
    except OSError as error:
        given = {"certfile": config.ssl_certfile, "keyfile": config.ssl_keyfile, "ca-certs": config.ssl_ca_certs}
        flags = " ".join(f"--ssl-{name} {file}" for name, file in given.items() if file)
        raise ConfigError(f"{flags}: expected certificates and the key in PEM, found: {error}") from None


def sampling_defaults(config: EngineConfig, folder: Path) -> dict[str, Any]:
    """What requests that say nothing are sampled with, by the names of SamplingParams: --generation-config."""
    if config.generation_config == "vllm":
        found = GenerationDefaults.from_dict(config.override_generation_config)
    else:
        where = folder if config.generation_config == "auto" else Path(config.generation_config)
        if where != folder and not (where / "generation_config.json").is_file():
            raise ConfigError(
                f"--generation-config {where}: expected auto, vllm or a folder with generation_config.json"
            )
        found = GenerationDefaults.from_folder(where, config.override_generation_config)
    values = asdict(found) | {"max_tokens": found.max_new_tokens}
    return {k: v for k, v in values.items() if v is not None and k not in ("max_new_tokens", "eos_token_ids")}


def banner(launch: Launch, facts: Mapping[str, Any], seconds: float) -> None:
    """What runs, in a few lines on stderr: coloured on a terminal, plain elsewhere."""
    console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
    console.print(f"[bold]leyden[/] {__version__}")
    for name, text in _rows(launch, facts, seconds):
        console.print(f"  [dim]{name:<9}[/] {escape(text)}")


def _rows(launch: Launch, facts: Mapping[str, Any], seconds: float) -> list[tuple[str, str]]:
    names = ", ".join(launch.server.served_model_name)
    size = f"{facts['parameters'] / 1e6:,.1f} million parameters in {_bytes(facts['weight_bytes'])}"
    tokens, longest = facts["cache_tokens"], facts["max_model_len"]
    return [
        ("model", launch.engine.model + (f" as {names}" if names else "")),
        ("device", f"{facts['device']}, {facts['dtype']}: {size}"),
        ("cache", str(facts["memory"])),
        (
            "requests",
            f"{facts['max_num_seqs']} at once, {facts['max_num_batched_tokens']:,} tokens per step; "
            f"{tokens // longest if longest else 0} of the longest context ({longest:,} tokens)",
        ),
        *([("drafts", str(facts["drafting"]))] if facts.get("drafting") else []),
        ("url", url(launch.server)),
        ("ready", f"after {seconds:.1f} s"),
    ]


def _bytes(count: int) -> str:
    return f"{count / GIB:,.1f} GiB" if count >= GIB else f"{count / 2**20:,.1f} MiB"


def url(config: ServerConfig) -> str:
    """Where clients find the API, as far as it is known before the socket is open (port 0: not yet)."""
    if config.uds:
        return f"unix:{config.uds}"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http{'s' if config.ssl_certfile else ''}://{host}:{config.port}{config.root_path}/v1"


def _read(template: str) -> str:
    """--chat-template: the text itself, or that of a file."""
    if any(mark in template for mark in "{}\n"):
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {template}: expected a text file in UTF-8, found: {error}") from None
