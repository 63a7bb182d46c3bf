"""The hub: one thread asks for all that wait, and no notice, no newcomer and no error is slept through."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from support import until

from gendurable.errors import DatabaseUnavailable, InstanceNotFound
from gendurable.notices import BOARD
from gendurable.waiting import Hub

SOON = 20.0
DONE = frozenset({"done"})


class World:
    """Where instances stand, and what was asked about them."""

    def __init__(self) -> None:
        self.standing: dict[int, str] = {}
        self.asked: list[list[int]] = []
        self.threads: set[int] = set()
        self.before_answer: Callable[[], object] = lambda: None

    def look(self, ids: Sequence[int]) -> dict[int, str]:
        self.asked.append(list(ids))
        self.threads.add(threading.get_ident())
        answer = {id: self.standing[id] for id in ids if id in self.standing}
        self.before_answer()
        return answer

    def end(self, id: int) -> None:
        """End an instance as a commit of this process would."""
        self.standing[id] = "done"
        BOARD.post([id])


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(100) as pool:
        yield pool


@pytest.fixture
def no_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is not told would wait for minutes."""
    monkeypatch.setattr("gendurable.waiting.FIRST_LOOK", 1000.0)
    monkeypatch.setattr("gendurable.waiting.LONGEST_PAUSE", 1000.0)


def waiting(pool: ThreadPoolExecutor, hub: Hub, id: int, seconds: float | None = SOON) -> "Future[bool]":
    before = len(hub._waiters)
    future = pool.submit(hub.wait, id, DONE, seconds)
    until(lambda: len(hub._waiters) > before or future.done(), "the thread waiting")
    return future


def test_what_stands_there_already_is_answered_by_the_first_look(world: World):
    world.standing[1] = "done"
    assert Hub(world.look).wait(1, DONE, SOON) is True
    assert world.asked == [[1]]


def test_what_does_not_exist_is_not_waited_for(world: World):
    with pytest.raises(InstanceNotFound, match="no instance has id 7"):
        Hub(world.look).wait(7, DONE, None)


def test_time_that_is_over_is_no_error(world: World):
    world.standing[1] = "runnable"
    assert Hub(world.look).wait(1, DONE, 0.05) is False
    assert not BOARD


def test_one_thread_asks_for_all_in_one_query(world: World, pool: ThreadPoolExecutor):
    hub = Hub(world.look)
    ids = list(range(1, 51))
    world.standing.update(dict.fromkeys(ids, "runnable"))
    futures = [waiting(pool, hub, id) for id in ids]
    until(lambda: world.asked[-1] == ids, "all of them in one query")
    assert len(world.threads) == 1
    world.standing.update(dict.fromkeys(ids, "done"))
    assert all(future.result(SOON) for future in futures)
    assert not hub._waiters
    assert not BOARD


def test_an_instance_that_takes_long_is_asked_for_ever_more_rarely(world: World, pool: ThreadPoolExecutor):
    world.standing[1] = "runnable"
    assert Hub(world.look).wait(1, DONE, 1.0) is False
    assert len(world.asked) <= 9, "10, 20, 40, 80, 160, 320 ms"


@pytest.mark.usefixtures("no_polls")
def test_what_this_process_ends_is_reported_without_a_poll(world: World, pool: ThreadPoolExecutor):
    hub = Hub(world.look)
    world.standing.update({1: "runnable", 2: "runnable"})
    first, second = waiting(pool, hub, 1), waiting(pool, hub, 2)
    world.end(2)
    assert second.result(SOON) is True
    world.end(1)
    assert first.result(SOON) is True


@pytest.mark.usefixtures("no_polls")
def test_a_notice_that_comes_while_the_answer_is_on_its_way_is_not_lost(world: World):
    world.standing[1] = "runnable"

    def commit_meanwhile() -> None:
        world.before_answer = lambda: None
        world.end(1)

    world.before_answer = commit_meanwhile
    assert Hub(world.look).wait(1, DONE, SOON) is True
    assert world.asked == [[1], [1]]


@pytest.mark.usefixtures("no_polls")
def test_a_newcomer_is_looked_at_while_the_leader_rests(world: World, pool: ThreadPoolExecutor):
    hub = Hub(world.look)
    world.standing.update({1: "runnable", 2: "done"})
    first = waiting(pool, hub, 1)
    until(lambda: world.asked, "the first look")
    assert hub.wait(2, DONE, SOON) is True
    world.end(1)
    assert first.result(SOON) is True


def test_when_the_leader_goes_another_asks(world: World, pool: ThreadPoolExecutor):
    hub = Hub(world.look)
    world.standing.update({1: "runnable", 2: "runnable"})
    leader = waiting(pool, hub, 1, seconds=0.2)
    follower = waiting(pool, hub, 2)
    assert leader.result(SOON) is False
    world.standing[2] = "done"
    assert follower.result(SOON) is True


def test_a_leader_that_is_interrupted_hands_over(world: World, pool: ThreadPoolExecutor):
    hub = Hub(world.look)
    world.standing.update({1: "runnable", 2: "runnable"})

    def interrupt() -> None:
        if len(hub._waiters) == 2:
            world.before_answer = lambda: None
            raise KeyboardInterrupt

    world.before_answer = interrupt
    leader = waiting(pool, hub, 1)
    follower = pool.submit(hub.wait, 2, DONE, SOON)
    assert isinstance(leader.exception(SOON), KeyboardInterrupt)
    world.standing[2] = "done"
    assert follower.result(SOON) is True


def test_what_goes_wrong_is_told_to_all_who_asked(world: World, pool: ThreadPoolExecutor):
    hub = Hub(world.look)
    ids = range(1, 11)
    world.standing.update(dict.fromkeys(ids, "runnable"))
    futures = [waiting(pool, hub, id) for id in ids]

    def fail() -> None:
        if len(world.asked[-1]) == 10:
            raise DatabaseUnavailable("gone")

    world.before_answer = fail
    assert [type(future.exception(SOON)) for future in futures] == [DatabaseUnavailable] * 10
    assert not hub._waiters
    assert not BOARD
