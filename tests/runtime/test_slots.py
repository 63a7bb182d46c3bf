"""The threads of a queue: who takes which claims, and when another thread starts."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from support import until

from gendurable.core.claim import Claim
from gendurable.runtime.prefetch import MOST_TOGETHER, Prefetch
from gendurable.runtime.slots import Slots


def claimed(id: int, key: str | None = None, *, priority: int = 0, step: str = "start") -> Claim:
    nothing = dict.fromkeys(Claim._fields)
    known = {"id": id, "fence": 1, "fsm": "m", "step": step, "priority": priority, "partition_key": key}
    return Claim(**{**nothing, **known})


class Threads:
    """Slots whose steps wait for permission; remembers what was taken together."""

    def __init__(self, size: int, together: Callable[[Claim], int]) -> None:
        self.taken: list[list[int]] = []
        self.go_on = threading.Semaphore(0)
        self.slots = Slots("q", size, self._run, together)

    def _run(self, claims: Sequence[Claim]) -> None:
        self.taken.append([claim.id for claim in claims])
        self.go_on.acquire()

    def finish(self, count: int = 1) -> None:
        self.go_on.release(count)


@pytest.fixture
def threads() -> Iterator[Callable[..., Threads]]:
    made: list[Threads] = []

    def make(size: int, together: Callable[[Claim], int] = lambda _: 1) -> Threads:
        made.append(Threads(size, together))
        return made[-1]

    yield make
    for each in made:
        each.slots.close()
        each.finish(1000)


def test_steps_that_take_their_time_have_all_the_threads(threads: Callable[..., Threads]):
    three = threads(3)
    three.slots.offer([claimed(id) for id in range(5)])
    until(lambda: len(three.taken) == 3, "three steps running")
    assert (three.slots.busy, three.slots.waiting) == (3, 2)
    three.finish()
    until(lambda: len(three.taken) == 4, "the fourth step running")
    assert (three.slots.busy, three.slots.waiting) == (3, 1)


def test_a_thread_that_is_free_again_starts_anew_for_what_comes_later(threads: Callable[..., Threads]):
    one = threads(1)
    for count in (1, 2, 3):
        one.slots.offer([claimed(count)])
        until(lambda count=count: len(one.taken) == count, "the step running")
        one.finish()
        until(lambda: one.slots.busy == 0, "the thread at rest")


def test_what_was_not_started_comes_back_and_nothing_starts_any_more(threads: Callable[..., Threads]):
    one = threads(1)
    one.slots.offer([claimed(1), claimed(2)])
    until(lambda: one.taken == [[1]], "the first step running")
    assert [claim.id for claim in one.slots.close()] == [2]
    one.slots.offer([claimed(3)])
    one.finish()
    until(lambda: one.slots.busy == 0, "the thread at rest")
    assert [claim.id for claim in one.slots.close()] == [3]
    assert one.taken == [[1]]


@contextmanager
def one_taker(threads: Callable[..., Threads], together: Callable[[Claim], int]) -> Iterator[Threads]:
    """One thread that is busy while claims are offered, and then takes them."""
    one = threads(1, together)
    one.slots.offer([claimed(0)])
    until(lambda: one.taken == [[0]], "the thread being busy")
    yield one
    one.finish(100)
    until(lambda: one.slots.busy == 0, "all taken")


def test_keyed_claims_are_taken_several_at_a_time_and_plain_ones_alone(threads: Callable[..., Threads]):
    with one_taker(threads, lambda _: 3) as one:
        one.slots.offer([*(claimed(id, f"k{id}") for id in range(1, 6)), claimed(6), claimed(7), claimed(8, "k8")])
    assert one.taken == [[0], [1, 2, 3], [4, 5], [6], [7], [8]]


def test_two_claims_of_one_key_are_never_taken_together(threads: Callable[..., Threads]):
    # One of them has been lost: its session would be granted the lock twice, and let go of it too early.
    with one_taker(threads, lambda _: 9) as one:
        one.slots.offer([claimed(1, "a"), claimed(2, "b"), claimed(3, "a")])
    assert one.taken == [[0], [1, 2], [3]]


def test_a_step_that_takes_its_time_is_not_taken_along(threads: Callable[..., Threads]):
    with one_taker(threads, lambda claim: 1 if claim.step == "slow" else 9) as one:
        one.slots.offer([claimed(1, "a"), claimed(2, "b", step="slow"), claimed(3, "c")])
    assert one.taken == [[0], [1], [2], [3]]


def test_how_many_share_a_session_depends_on_what_the_very_step_takes():
    prefetch = Prefetch(0, 10)
    quick, slow = claimed(1, "a", step="quick"), claimed(2, "b", step="slow")
    assert prefetch.together(quick) == 1, "nothing is known yet"
    for _ in range(100):
        prefetch.learn(quick, 0.000_01)
        prefetch.learn(slow, 0.1)
    assert (prefetch.together(quick), prefetch.together(slow)) == (MOST_TOGETHER, 1)
    prefetch.learn(quick, 10.0)
    assert prefetch.together(quick) == 1, "it may happen again"


def test_a_standstill_is_learned_at_once_unless_a_number_was_given():
    fixed, learning = Prefetch(7, 10), Prefetch("auto", 10)
    learning.learn(claimed(1), 0.001)
    assert learning.depth == 2000
    assert not learning.has_stalled(0.5)
    assert learning.depth == 2000
    assert learning.has_stalled(4.0)
    assert learning.depth == 0
    assert not fixed.has_stalled(4.0)
    assert fixed.depth == 7


def test_how_far_ahead_is_a_number_or_a_fraction_of_a_second():
    assert Prefetch(7, 10).depth == 7
    learning = Prefetch("auto", 10)
    assert learning.depth == 0
    learning.learn(claimed(1), 0.1)
    assert learning.depth == 20


def test_threads_are_started_when_needed_and_kept_for_more():
    seen: set[int] = set()
    ran = threading.Semaphore(0)

    def run(_: Sequence[Claim]) -> bool:
        seen.add(threading.get_ident())
        ran.release()
        return False

    slots = Slots("kept", 2, run, lambda _: 1)
    for id in range(50):
        slots.offer([claimed(id)])
        assert ran.acquire(timeout=20)
        until(lambda: slots.busy == 0, "the thread at rest")
    assert len(seen) == 1
    slots.offer([claimed(id) for id in range(50)])
    for _ in range(50):
        assert ran.acquire(timeout=20)
    assert len(seen) <= 2
    assert slots.close() == []
    until(lambda: not [each for each in threading.enumerate() if each.name.startswith("step kept")], "the threads gone")


def test_a_slot_that_was_handed_over_is_not_given_back_by_the_thread_that_had_it():
    left, go_on, handed = threading.Semaphore(0), threading.Semaphore(0), threading.Semaphore(0)

    def run(claims: Sequence[Claim]) -> bool:
        go_on.acquire()
        left.release()
        return claims[0].id == 1  # superseded

    slots = Slots("q", 1, run, lambda _: 1)
    slots.offer([claimed(1), claimed(2)])
    until(lambda: slots.waiting == 1, "the first one running")
    slots.hand_over(lambda: handed.acquire() and False)
    assert (slots.busy, slots.abandoned, slots.waiting) == (1, 1, 1)
    go_on.release()
    assert left.acquire(timeout=20)
    until(lambda: slots.abandoned == 0, "the superseded thread gone")
    assert (slots.busy, slots.waiting) == (1, 1), "the slot is the other thread's"
    handed.release()
    go_on.release()
    until(lambda: slots.busy == 0, "the second one through")
    assert slots.waiting == 0
    slots.close()
