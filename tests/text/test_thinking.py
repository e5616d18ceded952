from leyden.text.thinking import starts_thinking, with_thinking
from leyden.types import Grammar, SamplingParams


def test_where_an_answer_starts(tokenizer):
    def starts(text, default=True):
        return starts_thinking(tokenizer.encode(text), tokenizer, default)

    assert starts("<think>r</think>a<|im_start|>assistant\n<think>\n")
    assert not starts("<think>\n<|im_start|>assistant\n<think></think>")
    assert starts("no tags") and not starts("no tags", default=False)


def after(tokenizer, text, starts=True, params=None, **options):
    params = params or SamplingParams(thinking_token_budget=5)
    return with_thinking(params, tokenizer.encode(text), tokenizer, starts=starts, **options).thinking


def test_the_line_end_of_the_template_is_not_charged_and_thinking_in_the_prompt_is(tokenizer):
    assert after(tokenizer, "<think>old</think>a<think>\n").spent == 0
    assert after(tokenizer, "<think>").spent == 0
    assert after(tokenizer, "no tags").spent == 0
    assert after(tokenizer, "<think>\nI think").spent == len(tokenizer.encode("I think"))
    assert after(tokenizer, "<think>I think").spent == len(tokenizer.encode("I think"))
    closed = after(tokenizer, "<think>I think</think>", starts=False)
    assert closed.spent == 0 and not closed.open


def test_what_thinking_ends_with(tokenizer):
    opens, closes, calls = (tokenizer.id_of(text) for text in ("<think>", "</think>", "<tool_call>"))
    markers = after(tokenizer, "<think>\n").markers
    assert (markers.opens, markers.ends, markers.forced, markers.line_ends) == (opens, (closes,), (closes,), ())
    assert after(tokenizer, "<think>", calls=True).markers.ends == (closes, calls)
    assert after(tokenizer, "<think>", params=SamplingParams(grammar=Grammar("regex", "a"))).markers.opens is None
    forced = (*tokenizer.encode("\nEnough."), closes)
    for text in ("\nEnough.", "\nEnough.</think>", "\nEnough.</think>\n\n"):
        assert after(tokenizer, "<think>", forced=text).markers.forced == forced
    graceful = SamplingParams(thinking_token_budget=5, thinking_token_grace=3)
    ends = after(tokenizer, "<think>", params=graceful).markers.line_ends
    assert ends and all((id in ends) == ("\n" in tokenizer.decode([id])) for id in range(tokenizer.vocab_size))


def test_requests_that_do_not_need_it_carry_nothing(tokenizer):
    params = SamplingParams(thinking_token_grace=3)
    assert with_thinking(params, [1, 2], tokenizer, starts=True) is params
