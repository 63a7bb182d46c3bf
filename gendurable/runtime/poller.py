"""Poller: claims due rows of one queue into free slots; looks again soon after work, and ever more rarely when idle."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from random import choice
from time import monotonic

from attrs import evolve, frozen

from gendurable.core.claim import Claim
from gendurable.db import store
from gendurable.db.operations import LimitedLook, claim_batch, claim_limited, give_back
from gendurable.events import Claimed, TokensCounted
from gendurable.runtime.inflight import Inflight
from gendurable.runtime.loop import Loop, Wires, jittered
from gendurable.runtime.prefetch import Prefetch
from gendurable.runtime.session import Session
from gendurable.runtime.slots import Slots

FIRST_LOOK = 0.01
# Each pause is made twice before it doubles: rows that come every 100 ms start after 20 ms (median) instead of 40.
LOOKS_PER_PAUSE = 2
# While a deep backlog of plain rows is worked off, rows with a partition key or a limit are looked for no more often
# than this: the claim that knows about keys costs the server twice as much (1.6 against 0.7 ms for ten rows).
RARE_LOOK = 0.05
# Where a claim has to go from key to key it starts beyond one of these, another each time: no key waits for ever.
KEYS_REMEMBERED = 1000

NO_LOOK = LimitedLook([], [])


@frozen(kw_only=True)
class PollSettings:
    """How one queue is polled."""

    queue: str
    worker: str
    machines: Sequence[str]
    lease: timedelta
    poll: float
    max_poll: float
    min_demand: int
    keyed: bool
    # Whether any limit is known: without one, nobody looks for rows that have one.
    has_limits: Callable[[], bool]


class Poller(Loop):
    """Claims as many rows as there is room for.

    Hungry: the last claim was filled to its limit, so there may be more; the next one follows as soon as there is room.
    Sated: the queue was empty; the next look comes after a pause that doubles up to `poll` and, while nothing at all is
    in flight, up to `max_poll`. A row that this process itself made due cuts the pause short.
    """

    def __init__(
        self,
        settings: PollSettings,
        session: Session,
        wires: Wires,
        *,
        slots: Slots,
        prefetch: Prefetch,
        inflight: Inflight,
    ) -> None:
        """Poll the queue of `settings` for `slots`."""
        super().__init__(f"poller {settings.queue}", session, wires)
        self.slots = slots
        self.prefetch = prefetch
        self._settings = settings
        self._inflight = inflight
        self._avoided = Avoided()
        self._keys: deque[str] = deque(maxlen=KEYS_REMEMBERED)
        self._hungry = False
        self._alerted = False
        self._pause = FIRST_LOOK
        self._looks = 0
        self._last_claim = monotonic()
        self._look_for_keyed = monotonic()
        self._look_for_pause = monotonic()
        self._look_for_limited = monotonic()
        self._limited = NO_LOOK

    def run_once(self) -> float:
        """Claim what there is room for."""
        settings = self._settings
        if self.slots.waiting and monotonic() >= self._look_for_pause:
            self._look_for_pause = monotonic() + settings.poll
            if self.prefetch.has_stalled(self.slots.still_for) or self._is_paused():
                self._give_back()
        held = self._inflight.count(settings.queue)
        most = self.slots.size + self.prefetch.depth
        room = most - held
        if room <= 0:
            self._hungry = True
            # `slot_freed` will wake us long before; but what waits for a slot waits in vain once the queue is paused.
            return settings.poll if self.slots.waiting else settings.max_poll
        patience = self._last_claim + settings.poll - monotonic()
        if held and room < settings.min_demand and patience > 0:
            # For a fuller batch, but not for ever: what is held may be steps that take hours.
            self._hungry = True
            return patience
        alerted, self._alerted = self._alerted, False
        self._last_claim = monotonic()
        claims = self._claim_limited(room)
        if len(claims) < room:
            claims = claims + self._claim(room - len(claims))
        self._hungry = len(claims) == room or self._limited.more
        if self._hungry:
            self._pause = FIRST_LOOK
            return 0
        if claims or alerted or self._limited.contended:
            self._pause, self._looks = FIRST_LOOK, 0
        else:
            self._looks += 1
            if self._looks % LOOKS_PER_PAUSE == 0:
                longest = settings.poll if held or self._limited.blocked else settings.max_poll
                self._pause = min(self._pause * 2, longest)
        pause = jittered(self._pause)
        next_token = self._limited.next_token
        return pause if next_token is None else min(pause, max(next_token, FIRST_LOOK))

    def _is_paused(self) -> bool:
        return bool(store.is_paused(self._session.conn, queue=self._settings.queue).one())

    def _give_back(self) -> None:
        """Give back what was claimed ahead and not begun: the queue was paused, or others may be free for it."""
        unstarted = self.slots.recall()
        try:
            give_back(self._session.conn, unstarted)
        except Exception:
            self.slots.offer(unstarted)  # still ours: the heartbeat keeps them
            raise
        self._inflight.remove(unstarted)

    def _claim_limited(self, room: int) -> list[Claim]:
        """Claim rows that have limits. Before the others, since they take no more than is their turn among them."""
        if not self._settings.has_limits():
            self._limited = NO_LOOK
        elif not self._hungry or monotonic() >= self._look_for_limited:
            self._limited = self._take_limited(room)
            if not self._limited.claims and not self._limited.more:
                self._look_for_limited = monotonic() + RARE_LOOK
        else:
            self._limited = evolve(self._limited, claims=[], more=False, contended=False)
        return self._limited.claims

    def _claim(self, room: int) -> list[Claim]:
        if not self._settings.keyed:
            return self._take(room, keyed=False)
        if not self._hungry or monotonic() >= self._look_for_keyed:
            claims = self._take(room, keyed=True)
            if not any(claim.partition_key is not None for claim in claims):
                self._look_for_keyed = monotonic() + RARE_LOOK
            return claims
        claims = self._take(room, keyed=False)
        # A batch that is not full must mean that nothing else is due.
        return claims if len(claims) == room else claims + self._take(room - len(claims), keyed=True)

    def _take_limited(self, room: int) -> LimitedLook:
        settings = self._settings
        started = monotonic()
        look = claim_limited(
            self._session.conn,
            queue=settings.queue,
            machines=settings.machines,
            worker=settings.worker,
            limit=room,
            lease=settings.lease,
            keyed=settings.keyed,
            avoid=self._avoided.keys(),
        )
        for tokens in look.tokens:
            wanted = tokens.granted + tokens.throttled
            self._emit(TokensCounted(tokens.name, wanted, tokens.granted, tokens.throttled))
        if look.claims:
            self._begin(look.claims, monotonic() - started)
        return look

    def _take(self, room: int, *, keyed: bool) -> list[Claim]:
        settings = self._settings
        started = monotonic()
        claims = claim_batch(
            self._session.conn,
            queue=settings.queue,
            machines=settings.machines,
            worker=settings.worker,
            limit=room,
            lease=settings.lease,
            keyed=keyed,
            avoid=self._avoided.keys(),
            beyond=choice(self._keys) if self._keys else "",  # noqa: S311  for fairness, not for secrets
        )
        self._keys.extend(claim.partition_key for claim in claims if claim.partition_key is not None)
        self._begin(claims, monotonic() - started)
        return claims

    def _begin(self, claims: list[Claim], seconds: float) -> None:
        self._inflight.add(claims)
        self.slots.offer(claims)
        queue = self._settings.queue
        self._emit(Claimed(queue, len(claims), seconds, tuple(claim.waited for claim in claims)))

    def slot_freed(self) -> None:
        """There is room for another claim, or a limit has a place again: of interest if there may be more to claim."""
        if self._hungry or self._limited.blocked:
            self.wake()

    def row_due(self) -> None:
        """A commit of this process made a row of the queue due."""
        self._alerted = True
        self.wake()

    def avoid(self, key: str) -> None:
        """Leave a partition key alone for a moment: its lock was found taken."""
        self._avoided.add(key)


FIRST_AVOID, LONGEST_AVOID = 0.05, 2.0


class Avoided:
    """Partition keys whose lock was found taken, each left alone for a pause that doubles while that goes on."""

    def __init__(self) -> None:
        """Avoid nothing yet."""
        self._lock = threading.Lock()
        self._keys: dict[str, tuple[float, float]] = {}

    def add(self, key: str) -> None:
        """Avoid a key; longer, if it was avoided a moment ago."""
        with self._lock:
            _, pause = self._keys.get(key, (0.0, FIRST_AVOID / 2))
            pause = min(2 * pause, LONGEST_AVOID)
            self._keys[key] = (monotonic() + jittered(pause), pause)

    def keys(self) -> list[str]:
        """Return the keys to avoid now; those long past are forgotten."""
        now = monotonic()
        with self._lock:
            self._keys = {key: kept for key, kept in self._keys.items() if kept[0] + kept[1] > now}
            return [key for key, (until, _) in self._keys.items() if until > now]
