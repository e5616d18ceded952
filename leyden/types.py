"""The nouns that travel: API -> engine -> device and back.

    SamplingParams, Request   API -> engine (with Grammar and Thinking, for those that ask for them)
    Delta, TokenLogprobs      engine -> API
    Plan, Row, Admit          scheduler -> runner (a diff of the device tables, not their content)
    EngineStats               engine -> API (metrics, health, tests)

Nothing here imports torch, and every type is a plain dataclass, so that msgspec can carry it between processes.
"""

from dataclasses import dataclass, field
from math import isfinite

from leyden.errors import RequestError

MAX_SEED = 2**63 - 1
STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # tokens of a step, as buckets

GRAMMARS = ("json", "compact_json", "regex", "ebnf", "lark", "structural_tag")
# White space in a row between the parts of a JSON text, where a grammar rules: some models never get out of it.
MOST_BLANKS = 16
MAX_PATTERN = 1024  # tokens of a pattern that an answer is searched for after each of its tokens
MAX_LOGPROB_IDS = 128


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must match, from its first token or from the first one after thinking. Equal ones compile once.

    kind    json (text: a JSON schema), compact_json (the same, with one blank after commas and colons and no other
            white space outside of strings), regex, ebnf, lark, structural_tag (text: xgrammar's JSON for them)
    param   the field of the request that it comes from, for error messages
    """

    kind: str
    text: str
    param: str = field(default="grammar", compare=False)

    def __post_init__(self) -> None:
        if self.kind not in GRAMMARS:
            raise RequestError(f"a grammar is one of {', '.join(GRAMMARS)}, got {self.kind!r}", self.param)


@dataclass(frozen=True, slots=True, kw_only=True)
class Markers:
    """The token ids that thinking begins and ends with."""

    opens: int | None  # <think>; None: thinking that has ended never begins again
    ends: tuple[int, ...]  # </think>, and whatever else the model may end its thinking with; the first one is the tag
    forced: tuple[int, ...]  # what is put in the answer where the budget is spent; its last id is one of `ends`
    line_ends: tuple[int, ...] = ()  # tokens with a line end in their text, if there is a grace


@dataclass(slots=True, kw_only=True)
class Thinking:
    """Where a prompt leaves the model: whoever makes the prompt knows."""

    markers: Markers
    open: bool  # the answer begins inside thinking
    spent: int = 0  # tokens of thinking that are in the prompt already


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """An answer ends when its last tokens are one pattern, `min_count` times in a row."""

    max_pattern_size: int = 0  # tokens; 0: answers may repeat themselves
    min_pattern_size: int = 0  # 0 means 1
    min_count: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.min_pattern_size <= self.max_pattern_size <= MAX_PATTERN:
            raise RequestError(
                "repetition_detection needs 0 <= min_pattern_size <= max_pattern_size <= "
                f"{MAX_PATTERN}, got {self.min_pattern_size} and {self.max_pattern_size}",
                "repetition_detection",
            )
        if self.max_pattern_size and self.min_count < 2:
            message = f"repetition_detection.min_count must be at least 2, got {self.min_count}"
            raise RequestError(message, "repetition_detection")


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How one request wants its tokens. The defaults are neutral; a server puts generation_config.json below them.

    Processing order of the logits: logit_bias and allowed_token_ids, min_tokens mask, penalties, banned, grammar,
    temperature, min_p, top_k, top_p. Where these leave no token at all, the grammar alone counts; without one the
    answer ends. The tokens that end thinking at its budget are put in whatever the logits say. The engine sees ids
    only: `stop` is searched, and `bad_words` are turned into `banned`, by the text layer.
    """

    temperature: float = 1.0  # below 1e-5: greedy, ties go to the lowest id
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    presence_penalty: float = 0.0  # over generated tokens
    frequency_penalty: float = 0.0  # over generated tokens
    repetition_penalty: float = 1.0  # over prompt and generated tokens
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = field(default_factory=list)
    banned: list[list[int]] = field(default_factory=list)  # sequences of ids that the answer must not hold
    seed: int | None = None  # None: the engine draws one
    n: int = 1  # copies; the caller sends one Request per copy
    max_tokens: int | None = 16  # None: up to the context limit
    min_tokens: int = 0
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # None: off; k: the sampled token and the k most likely ones; -1: all
    logprob_token_ids: list[int] | None = None  # with logprobs: these tokens instead of the most likely ones
    prompt_logprobs: int | None = None  # like logprobs, for the tokens of the prompt
    repetition_detection: Repetition | None = None
    grammar: Grammar | None = None
    thinking_token_budget: int | None = None  # most tokens of thinking, those in the prompt included; None: no limit
    thinking_token_grace: int = 0  # tokens beyond the budget in which a line may be ended; with budget 0 there is none
    thinking: Thinking | None = None  # what the two above and `grammar` need to know; None: there is no thinking

    def __post_init__(self) -> None:
        """Raises RequestError that names the field: one place for the HTTP API and for LLM."""
        _between("temperature", self.temperature, 0, 2)
        _between("top_p", self.top_p, 0, 1, open_low=True)
        _whole("top_k", self.top_k, -1)
        _between("min_p", self.min_p, 0, 1)
        _between("presence_penalty", self.presence_penalty, -2, 2)
        _between("frequency_penalty", self.frequency_penalty, -2, 2)
        _between("repetition_penalty", self.repetition_penalty, 0, None, open_low=True)
        _whole("n", self.n, 1)
        _whole("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens must not be above max_tokens ({self.max_tokens}), got {self.min_tokens}", "min_tokens"
                )
        if self.seed is not None:
            _whole("seed", self.seed, -MAX_SEED - 1)
            if self.seed > MAX_SEED:
                raise RequestError(f"seed must fit in 64 bits, got {self.seed}", "seed")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), -1)
        if self.thinking_token_budget is not None:
            _whole("thinking_token_budget", self.thinking_token_budget, 0)
        _whole("thinking_token_grace", self.thinking_token_grace, 0)
        if any(not s for s in self.stop):
            raise RequestError("stop must not hold an empty string", "stop")
        if any(not word for word in self.bad_words) or any(not ids for ids in self.banned):
            raise RequestError("bad_words must not hold an empty word", "bad_words")
        if len(self.logprob_token_ids or ()) > MAX_LOGPROB_IDS:
            raise RequestError(f"logprob_token_ids must hold at most {MAX_LOGPROB_IDS} ids", "logprob_token_ids")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids must not be empty", "allowed_token_ids")
        if self.greedy and self.n > 1:
            raise RequestError(f"n must be 1 with temperature 0 (all copies would be equal), got {self.n}", "n")

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def penalized(self) -> bool:
        """Whether counts of earlier tokens are needed to process the logits."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0

    @property
    def looks_back(self) -> bool:
        """Whether the tokens of the answer so far are needed to go on."""
        return self.penalized or self.budgeted or bool(self.banned)

    @property
    def budgeted(self) -> bool:
        """Whether thinking may have to be ended."""
        return self.thinking is not None and self.thinking_token_budget is not None


def _between(name: str, value: float, low: float, high: float | None, open_low: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    above = number and (value > low if open_low else value >= low)
    if not (above and (high is None or value <= high)):
        if high is None:
            wanted = f"a finite number above {low}"
        else:
            wanted = f"a number in {'(' if open_low else '['}{low}, {high}]"
        raise RequestError(f"{name} must be {wanted}, got {value!r}", name)


def _whole(name: str, value: int, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise RequestError(f"{name} must be a whole number of at least {low}, got {value!r}", name)


@dataclass(slots=True, kw_only=True)
class Request:
    """One sequence to generate. `prompt` holds token ids; `id` is unique among the running requests."""

    id: str
    prompt: list[int]
    params: SamplingParams
    priority: int = 0  # lower runs earlier, with --scheduling-policy priority
    arrival: float = 0.0  # seconds, any monotonic clock of the sender
    cache_salt: str = ""  # prompts with different salts never share cached state
    # Lengths of the prompt at which later prompts are likely to leave it (end of the system block, last header): the
    # state is kept there. Empty: the last page border.
    marks: list[int] = field(default_factory=list)


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the raw logits (before penalties, bias and temperature)."""

    token_id: int  # the token that stands there
    logprob: float
    rank: int  # 1 = it was the most likely one
    top_ids: list[int]  # most likely first
    top_logprobs: list[float]


@dataclass(slots=True, kw_only=True)
class Delta:
    """What one engine step brought for one request; the one with `finish_reason` is the last.

    finish_reason: "stop" (end-of-sequence or stop token), "length", "repetition", "abort", "error" (`error` says why).
    stop_reason: the id of the stop token that was met; None for the end-of-sequence token itself.
    """

    request_id: str
    token_ids: list[int] = field(default_factory=list)  # a stop token is included, as the last one
    logprobs: list[TokenLogprobs] | None = None  # one per token id, if asked for
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # once, None for the first position
    finish_reason: str | None = None
    stop_reason: int | None = None
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    queued: float = 0.0  # seconds from Request.arrival until it first ran, told once
    drafted: int = 0  # drafts that the step tried, and how many of them were right
    accepted: int = 0
    error: str | None = None


@dataclass(slots=True)
class Row:
    """One sequence's share of a step: it advances by `n` tokens, or by fewer where the last `drafts` of them are wrong.

    `tokens` are the ids to feed; empty means the one sampled last and the drafts behind it, which the host may not know
    yet (device tables).
    """

    slot: int  # index of the sequence in every device table, its state slot among them; 0 is the padding slot
    start: int  # tokens of the sequence before this step, as far as the host knows: never less than the device says
    n: int
    tokens: list[int]
    sample: bool  # the row ends at the last known token: sample the next one
    targets: list[int] = field(default_factory=list)  # prompt ids that follow the row's first tokens: logprobs wanted
    drafts: int = 0  # a row with drafts samples behind the token before them and behind each of them
    following: int = -1  # the token after the last one, where it is known: drafters ask for it


@dataclass(slots=True)
class Admit:
    """A sequence enters a slot: its sampling parameters go to the device tables, its state is put in place."""

    slot: int
    request_id: str
    params: SamplingParams
    seed: int
    prompt_len: int  # tokens of the prompt (min_tokens and penalties count from here)
    stop_ids: tuple[int, ...]  # ids that would end it; masked until min_tokens are there
    tokens: list[int]  # known tokens, prompt included, if `params.looks_back`; else empty
    computed: int = 0  # tokens that are cached: the state is that of `source`
    source: int = 0  # slot to copy the state from; 0: zero state


@dataclass(slots=True)
class Moves:
    """Pages and states between the device and host memory: (from, to)."""

    pages_out: list[tuple[int, int]] = field(default_factory=list)
    pages_in: list[tuple[int, int]] = field(default_factory=list)
    states_out: list[tuple[int, int]] = field(default_factory=list)
    states_in: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.pages_out or self.pages_in or self.states_out or self.states_in)


@dataclass(slots=True)
class Plan:
    """A diff of the device tables, and the rows of the step: those of one token and as many drafts as there can be come
    first, longer ones after.

    In this order: moves, admits, copies and pages are carried out (all of them read before any writes), the rows run,
    then snapshots are taken.
    """

    moves: Moves | None = None

    admits: list[Admit] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (page, page that receives its content)
    pages: list[tuple[int, int, int]] = field(default_factory=list)  # (slot, index in its page table, page)
    rows: list[Row] = field(default_factory=list)
    snapshots: list[tuple[int, int]] = field(default_factory=list)  # (slot, slot that receives its state)
    drafter: int = 0  # which one proposes `drafts` tokens behind each row that samples
    drafts: int = 0


@dataclass(slots=True)
class Sampled:
    """What a row of the step came to, on the host."""

    tokens: list[int] = field(default_factory=list)  # the drafts that were right, and one more; none: it did not sample
    logprobs: list[TokenLogprobs] | None = None  # one per token, if asked for
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per Row.targets
    # Proposed for its next row: -1 where there is nothing to propose, and where a grammar then refuses it.
    drafts: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)  # how likely each is kept if those before it are, if known


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """Counters and gauges of an engine at one moment. Tokens are counted once they are committed."""

    running: int = 0
    waiting: int = 0
    slots_total: int = 0
    slots_free: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0  # kept for later, given up when room is needed
    snapshots: int = 0
    host_slots_total: int = 0  # places for states in host memory; 0: there is no second tier
    host_slots_free: int = 0
    host_pages_total: int = 0
    host_pages_free: int = 0
    moved: dict[str, int] = field(default_factory=dict)  # what went there and came back, by the names of Moves
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt tokens, those that were not computed
    generated_tokens: int = 0
    preemptions: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # by finish_reason
    step_tokens: int = 0  # sum over the steps
    step_sizes: list[int] = field(default_factory=lambda: [0] * (len(STEP_SIZES) + 1))  # steps per bucket, then more
    drafts: int = 0  # rows that had drafts to verify
    drafted_tokens: int = 0  # those drafts
    accepted_tokens: list[int] = field(default_factory=list)  # by their position in the draft
    hits: dict[str, int] = field(default_factory=dict)  # prompts by where their beginning was: none, device, host
    recorded_steps: int = 0  # of the steps, those that ran from a recording (a graph, a program)
    failed_drafts: int = 0  # steps for which the drafter failed, so that the next one had no drafts
    draft_seconds: float = 0.0  # on the host, launches and failures included
    verify_seconds: float = 0.0  # the same of the target's part of steps with drafts
    synthetic: bool = False  # drafts are accepted by decree: the text is nonsense, only times mean something
