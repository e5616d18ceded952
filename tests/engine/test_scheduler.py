from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.engine import scheduler as scheduler_module
from leyden.engine.scheduler import Limits, Scheduler
from leyden.types import Request, SamplingParams
from tests.engine.device import Device, drive, expected, request, tokens_of


def limits(**changes: object) -> Limits:
    given = {"seqs": 4, "pages": 40, "page": 4, "max_model_len": 64, "step_tokens": 16} | changes
    return Limits(**given)  # type: ignore[arg-type]


def prompt(name: int, n: int) -> list[int]:
    return [(name * 17 + i * 5) % 50 for i in range(n)]


@st.composite
def scenes(draw: st.DrawFn) -> tuple[Limits, list[tuple[int, Request]], dict[int, list[str]], bool]:
    page = draw(st.integers(1, 5))
    longest = draw(st.integers(4, 40))
    drafts = draw(st.sampled_from([0, 0, 1, 3, 7]))
    lookahead = draw(st.integers(0, drafts))
    # the smallest pool that the engine would accept: one sequence of full length
    pages = -(-(longest + lookahead) // page) + draw(st.integers(0, 12))
    lim = Limits(
        seqs=draw(st.integers(1, 5)),
        snapshots=draw(st.integers(0, 4)),
        prefix_caching=draw(st.sampled_from([True, True, False])),
        host_slots=draw(st.sampled_from([0, 1, 2, 5])),
        host_pages=draw(st.integers(0, 20)),
        snapshot_every=draw(st.sampled_from([5, 8192])),
        pages=pages,
        page=page,
        max_model_len=longest,
        step_tokens=draw(st.integers(1, 20)),
        row_tokens=draw(st.sampled_from([0, 0, 1, 3])),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        drafts=drafts,
        lookahead=lookahead,
    )
    arrivals = []
    for i in range(draw(st.integers(1, 9))):
        length, step = draw(st.integers(1, longest - 1)), 0
        # few first tokens, so that prompts share prefixes of any length
        shared = prompt(draw(st.integers(0, 2)), draw(st.integers(0, length)))
        words = [*shared, *prompt(i, length)][:length]
        if arrivals and draw(st.booleans()):  # somebody comes back
            earlier, step = draw(st.sampled_from([(r, at) for at, r in arrivals]))
            words = [*earlier.prompt, *expected(earlier), *words][
                : max(length, min(longest - 1, len(earlier.prompt) + 8))
            ]
        marks = sorted(draw(st.sets(st.integers(1, len(words)), max_size=2)))
        made = request(
            f"r{i}",
            words,
            draw(st.integers(1, 15)),
            priority=draw(st.integers(0, 2)),
            marks=marks,
            cache_salt=draw(st.sampled_from(["", "", "other"])),
        )
        made.params.stop_token_ids = draw(st.lists(st.integers(0, 49), max_size=4))
        arrivals.append((step + draw(st.integers(0, 25)), made))
    ids = st.sampled_from([r.id for _, r in arrivals])
    aborts = draw(st.dictionaries(st.integers(0, 40), st.lists(ids, max_size=2), max_size=4))
    return lim, arrivals, aborts, draw(st.booleans())


@given(scenes(), st.sampled_from([1, 3, 32]))
@settings(max_examples=500, deadline=None)
def test_every_request_gets_its_tokens_whatever_the_pool(scene, worth) -> None:
    scheduler_module._WORTH = worth  # snapshots of short prompts, too
    lim, arrivals, aborts, overlap = scene
    scheduler, out = drive(lim, arrivals, aborts, overlap)
    for _, made in arrivals:
        deltas = out[made.id]
        want = expected(made)[: lim.max_model_len - len(made.prompt)]
        got = tokens_of(deltas)
        assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert deltas[-1].finish_reason in ("length", "stop", "abort")
        assert got == want if deltas[-1].finish_reason != "abort" else got == want[: len(got)]
    stats = scheduler.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    if not lim.prefix_caching:
        assert (stats.slots_free, stats.pages_free) == (stats.slots_total, lim.pages)
    scheduler.cache.clear()
    scheduler.check()
    stats = scheduler.stats()
    assert (stats.slots_free, stats.pages_free) == (stats.slots_total, lim.pages)


def test_a_long_prompt_does_not_hold_up_the_others() -> None:
    scheduler = Scheduler(limits(step_tokens=8))
    device = Device(scheduler.limits)
    scheduler.add(request("short", prompt(2, 2), 8))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.commit(plan, device.run(plan))
    scheduler.add(request("long", prompt(1, 40), 4))
    for _ in range(6):  # the long prompt takes six steps of what is left
        plan = scheduler.plan()
        assert plan is not None
        assert [row.n for row in plan.rows][0] == 1
        assert "short" in [d.request_id for d in scheduler.commit(plan, device.run(plan))]


def test_preemption_takes_the_youngest_and_it_continues_without_gap_or_repeat() -> None:
    two = [(0, request("a", prompt(1, 40), 20)), (0, request("b", prompt(2, 38), 20))]
    scheduler, out = drive(limits(pages=24, seqs=2), two, {}, overlap=True)
    assert scheduler.stats().preemptions >= 1
    for _, made in two:
        assert tokens_of(out[made.id]) == expected(made)


def test_priority_runs_lower_numbers_first_and_fcfs_ignores_them() -> None:
    for policy, first in (("priority", "b"), ("fcfs", "a")):
        scheduler = Scheduler(limits(seqs=1, policy=policy))
        scheduler.add(request("a", prompt(1, 3), 2, priority=1))
        scheduler.add(request("b", prompt(2, 3), 2, priority=0))
        plan = scheduler.plan()
        assert plan is not None
        assert [s.request.id for s in scheduler.running] == [first]


def test_stop_tokens_end_after_min_tokens_only() -> None:
    made = request("a", prompt(1, 3), 12)
    answer = expected(made)
    stop = answer[4]
    params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[stop])
    _, out = drive(limits(), [(0, Request(id="a", prompt=made.prompt, params=params))], {}, overlap=False)
    cut = answer.index(stop) + 1
    assert tokens_of(out["a"]) == answer[:cut]
    assert (out["a"][-1].finish_reason, out["a"][-1].stop_reason) == ("stop", stop)
    late = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[stop], min_tokens=cut)
    _, out = drive(limits(), [(0, Request(id="a", prompt=made.prompt, params=late))], {}, overlap=False)
    assert len(tokens_of(out["a"])) > cut


def test_end_of_sequence_can_be_ignored() -> None:
    made = request("a", prompt(1, 3), 12)
    eos = expected(made)[2]
    for ignore in (False, True):
        scheduler = Scheduler(limits(), eos_token_ids=[eos])
        device = Device(scheduler.limits)
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=ignore)
        scheduler.add(Request(id="a", prompt=made.prompt, params=params))
        got = []
        while scheduler.unfinished:
            plan = scheduler.plan()
            assert plan is not None
            got += tokens_of(scheduler.commit(plan, device.run(plan)))
        assert got == (expected(made) if ignore else expected(made)[: expected(made).index(eos) + 1])


def test_a_failed_step_ends_its_requests_only() -> None:
    scheduler = Scheduler(limits(step_tokens=3))
    device = Device(scheduler.limits)
    scheduler.add(request("a", prompt(1, 3), 3))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.add(request("b", prompt(2, 3), 3))
    (delta,) = scheduler.fail(plan, "broken")
    assert (delta.request_id, delta.finish_reason, delta.error) == ("a", "error", "broken")
    got = []
    while scheduler.unfinished:
        plan = scheduler.plan()
        assert plan is not None
        got += scheduler.commit(plan, device.run(plan))
    scheduler.check()
    assert tokens_of(got) == expected(request("b", prompt(2, 3), 3))


def step(scheduler: Scheduler, device: Device) -> tuple[dict[str, int], list[str]]:
    """One step -> tokens by request, and the requests that got a token."""
    plan = scheduler.plan()
    assert plan is not None
    names = {s.slot: s.request.id for s in scheduler.running}
    deltas = scheduler.commit(plan, device.run(plan))
    return {names[row.slot]: row.n for row in plan.rows}, [d.request_id for d in deltas]


def test_a_short_prompt_does_not_wait_behind_a_long_one_which_keeps_half() -> None:
    scheduler = Scheduler(limits(step_tokens=8, pages=200, seqs=8, max_model_len=400))
    device = Device(scheduler.limits)
    scheduler.add(request("long", prompt(1, 300), 2))
    step(scheduler, device)
    for i in range(6):
        scheduler.add(request(f"short{i}", prompt(2 + i, 6), 1))
    first: dict[str, int] = {}
    for n in range(80):
        rows, done = step(scheduler, device)
        if "long" in done:
            break
        # its half, but for what the next token of others takes first
        assert rows["long"] >= (8 - sum(k == 1 for k in rows.values())) // 2
        first |= {name: n for name in done if name not in first}
    assert len(first) == 6 and max(first.values()) < 12
    assert "long" in done


def test_equal_prompts_come_one_after_the_other() -> None:
    scheduler = Scheduler(limits(step_tokens=8))
    device = Device(scheduler.limits)
    for i in range(3):
        scheduler.add(request(f"r{i}", prompt(i, 32), 1))
    order: list[str] = []
    while scheduler.unfinished:
        order += step(scheduler, device)[1]
    assert order == ["r0", "r1", "r2"]


def test_partial_prefills_are_limited_and_short_prompts_overtake_long_ones() -> None:
    scheduler = Scheduler(limits(step_tokens=8, pages=200, partial_prefills=1))
    device = Device(scheduler.limits)
    for i in range(3):
        scheduler.add(request(f"r{i}", prompt(i, 50 - i), 2))
    while scheduler.unfinished:
        step(scheduler, device)
        assert sum(s.prefilling for s in scheduler.running) <= 1
    lim = limits(step_tokens=8, pages=200, long_partial_prefills=1, row_tokens=20, max_model_len=100)
    scheduler, device = Scheduler(lim), Device(lim)
    for name, n in (("a", 60), ("b", 60), ("c", 5)):
        scheduler.add(request(name, prompt(len(name), n), 2))
    order: list[str] = []
    while scheduler.unfinished:
        order += step(scheduler, device)[1]
        assert sum(s.todo > 20 for s in scheduler.running) <= 1
    assert order.index("c") < order.index("a") < order.index("b")
    assert Limits(seqs=1, pages=9, page=4, max_model_len=1000, step_tokens=8).long == 40


def test_a_step_with_a_long_prompt_is_paced_only_where_somebody_waits() -> None:
    for paced, most in ((True, 2), (False, 127)):
        scheduler = Scheduler(limits(step_tokens=128, pages=300, max_model_len=600, paced=paced))
        device = Device(scheduler.limits)
        scheduler.add(request("long", prompt(1, 400), 40))
        assert step(scheduler, device)[0] == {"long": 128}
        scheduler.add(request("short", prompt(3, 2), 40))
        seen = [step(scheduler, device)[0] for _ in range(3)]
        assert max(rows.get("long", 0) for rows in seen[1:]) == most  # the first ones are probes


def test_preempted_with_drafts_under_way() -> None:
    """Nobody knows how far the state will be, so it is not kept as that of any length."""
    preemptions = accepted = 0
    for pages in range(16, 28):
        three = [(i * 3, request(f"r{i}", prompt(i, 12 + 5 * i), 30)) for i in range(3)]
        given = limits(pages=pages, seqs=3, snapshots=4, drafts=3, lookahead=2, max_model_len=60)
        scheduler, out = drive(given, three, {}, overlap=True)
        for _, made in three:
            assert tokens_of(out[made.id]) == expected(made)
        preemptions += scheduler.stats().preemptions
        accepted += sum(scheduler.stats().accepted_tokens)
    assert preemptions > 10 and accepted > 500


def test_prompts_are_not_paced_where_they_are_more_than_the_answers() -> None:
    scheduler = Scheduler(limits(step_tokens=64, pages=400, seqs=8, max_model_len=200))
    device = Device(scheduler.limits)
    scheduler.add(request("stream", prompt(1, 3), 40))
    step(scheduler, device)
    for i in range(3):
        scheduler.add(request(f"r{i}", prompt(2 + i, 100), 4))
    assert sum(step(scheduler, device)[0].values()) == 64


def test_a_failed_step_with_moves_leaves_nothing_that_is_trusted() -> None:
    scheduler = Scheduler(limits(seqs=1, pages=10, host_slots=4, host_pages=30))
    device = Device(scheduler.limits)
    for name in range(3):  # the third needs the room of the others
        scheduler.add(request(f"r{name}", prompt(name, 14), 2))
        while scheduler.unfinished:
            step(scheduler, device)
    assert scheduler.cache.far_snapshots
    scheduler.add(request("back", [*prompt(0, 14), *expected(request("r0", prompt(0, 14), 2))], 2))
    plan = scheduler.plan()
    assert plan is not None and plan.moves is not None
    (delta,) = scheduler.fail(plan, "broken")
    assert delta.finish_reason == "error"
    scheduler.check()
    assert (scheduler.cache.snapshots, scheduler.cache.far_snapshots) == (0, 0)
    again = request("again", prompt(0, 14), 2)
    scheduler.add(again)
    got = []
    while scheduler.unfinished:
        plan = scheduler.plan()
        assert plan is not None
        got += tokens_of(scheduler.commit(plan, device.run(plan)))
    assert got == expected(again)
