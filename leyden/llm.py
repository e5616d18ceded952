"""The engine without a server: prompts in, answers out, in this process.

from leyden import LLM, SamplingParams

with LLM("path/to/checkpoint") as llm:
    for output in llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=32)):
        print(output.outputs[0].text)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from tqdm import tqdm

from leyden.config.engine import EngineConfig
from leyden.config.folder import resolve
from leyden.config.generation import GenerationDefaults
from leyden.engine.engine import Engine
from leyden.errors import ConfigError, LeydenError
from leyden.text.stream import TextStream
from leyden.text.template import ChatTemplate, normalise
from leyden.text.thinking import starts_thinking, with_thinking
from leyden.text.tokenizer import Tokenizer
from leyden.text.words import spellings
from leyden.types import Request, SamplingParams, TokenLogprobs

Prompt = str | Sequence[int]


@dataclass(slots=True)
class Completion:
    """One answer. `text` is cut at a stop string, `token_ids` hold what was generated, a stop token included."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None  # "stop" or "length"
    stop_reason: int | str | None = None  # the stop token's id or the stop string


@dataclass(slots=True)
class Output:
    """What one prompt came to: `params.n` completions."""

    prompt: str | None  # None for prompts that were given as token ids
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class LLM:
    """A model ready to generate. `options` are the fields of EngineConfig, that is, the flags of `leyden serve`.

    skip_tokenizer_init  prompts are token ids, answers have no text, and no tokenizer is needed
    """

    def __init__(self, model: str, *, skip_tokenizer_init: bool = False, **options: Any):
        """Raises ConfigError or CheckpointError."""
        folder = resolve(model, options.get("revision"))
        config = EngineConfig(model=str(folder), **options)
        self._texts = resolve(config.tokenizer) if config.tokenizer else folder
        self._tokenizer = None if skip_tokenizer_init else Tokenizer.from_folder(self._texts)
        self.defaults = GenerationDefaults.from_folder(folder, config.override_generation_config)
        self.engine = Engine.load(config)
        self._count = 0

    def close(self) -> None:
        """End what runs, and save the cache to `cache_dir` if there is one. The LLM must not be used again."""
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ConfigError if there is to be none."""
        if self._tokenizer is None:
            raise ConfigError(
                "texts, stop strings, bad words, grammars and thinking budgets need the tokenizer, and this LLM was "
                "made with skip_tokenizer_init: give prompts as token ids, or leave the option out"
            )
        return self._tokenizer

    def _stream(self, params: SamplingParams, prompt: Sequence[int]) -> "TextStream | _NoText":
        """What makes the text of one answer to `prompt`."""
        return _NoText() if self._tokenizer is None and not params.stop else TextStream(self.tokenizer, params, prompt)

    def sampling_params(self, **changes: Any) -> SamplingParams:
        """SamplingParams with the checkpoint's recommendations below `changes`."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        given = {name: value for name in names if (value := getattr(self.defaults, name)) is not None}
        return SamplingParams(**(given | changes))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[Output]:
        """Answers to prompts (texts or token ids), in their order. `params`: one for all, or one for each.

        Raises RequestError if a prompt cannot be served as asked; then none is.
        """
        single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        every = cast(list[Prompt], [prompts] if single else prompts)
        if params is None:
            params = self.sampling_params()
        each = [params] * len(every) if isinstance(params, SamplingParams) else list(params)
        jobs = [_Job(self, prompt, p) for prompt, p in zip(every, each, strict=True)]
        return self._answer(jobs, progress)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> Output:
        """The answer to one conversation, rendered with the checkpoint's template (`enable_thinking=False`, ...)."""
        template = ChatTemplate.from_folder(self._texts, self.tokenizer)
        prompt = template.encode(normalise(messages), tools, kwargs=template_kwargs)
        job = _Job(self, prompt, params or self.sampling_params(), template.marks(prompt), calls=bool(tools))
        return self._answer([job])[0]

    def _answer(self, jobs: list["_Job"], progress: bool = False) -> list[Output]:
        started: dict[str, tuple[_Job, int]] = {}
        try:
            for job in jobs:
                for index in range(job.params.n):
                    self._count += 1
                    request = job.request(f"llm-{self._count}", index)
                    self.engine.submit(request)
                    started[request.id] = job, index
            with tqdm(total=len(started), unit="answer", disable=not progress) as bar:
                self._run(started, bar)
        finally:
            for request_id in started:
                self.engine.abort(request_id)
        return [job.output for job in jobs]

    def _run(self, started: dict[str, tuple["_Job", int]], bar: "tqdm[Any]") -> None:
        while started:
            for delta in self.engine.step():
                if delta.request_id not in started:
                    continue
                if delta.error is not None:
                    raise LeydenError(delta.error)
                job, index = started[delta.request_id]
                if job.take(index, delta):
                    self.engine.abort(delta.request_id)
                    del started[delta.request_id]
                    bar.update()


class _NoText:
    """The text of an answer without a tokenizer."""

    stop: str | None = None

    def push(self, ids: Sequence[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


class _Job:
    """A prompt on its way: the text of its answers as far as it has come."""

    def __init__(
        self, llm: LLM, prompt: Prompt, params: SamplingParams, marks: Sequence[int] = (), calls: bool = False
    ):
        text = prompt if isinstance(prompt, str) else None
        ids = llm.tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else list(prompt)
        if params.thinking is None and (params.grammar is not None or params.thinking_token_budget is not None):
            starts = starts_thinking(ids, llm.tokenizer, default=False)
            params = with_thinking(params, ids, llm.tokenizer, starts=starts, calls=calls)
        if params.bad_words:
            params = replace(params, banned=[*params.banned, *spellings(params.bad_words, llm.tokenizer)])
        self.params = params
        self._marks = list(marks)
        self.output = Output(text, ids, [Completion(i) for i in range(params.n)])
        self._streams = [llm._stream(params, ids) for _ in range(params.n)]

    def request(self, request_id: str, index: int) -> Request:
        params = self.params
        if params.n > 1:
            seed = None if params.seed is None else params.seed + index
            params = replace(params, n=1, seed=seed)
        return Request(id=request_id, prompt=self.output.prompt_token_ids, params=params, marks=self._marks)

    def take(self, index: int, delta: Any) -> bool:
        """Add a delta; True if this answer is over."""
        answer, stream = self.output.outputs[index], self._streams[index]
        ids = delta.token_ids
        answer.token_ids += ids
        if delta.logprobs is not None:
            answer.logprobs = (answer.logprobs or []) + delta.logprobs
        if delta.prompt_logprobs is not None:
            self.output.prompt_logprobs = delta.prompt_logprobs
        answer.text += stream.push(ids[:-1] if delta.finish_reason == "stop" else ids)
        if stream.stop is not None:
            answer.finish_reason, answer.stop_reason = "stop", stream.stop
        elif delta.finish_reason is not None:
            answer.text += stream.finish()
            answer.finish_reason, answer.stop_reason = delta.finish_reason, delta.stop_reason
        return answer.finish_reason is not None
