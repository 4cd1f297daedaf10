"""Signs of life between the machines of a launch, so that a lost machine ends the run before its collectives time out.

Each process writes where it stands into the launch's store, and the first process of each machine reads what those of
other machines wrote; so machines do not depend on a common clock, and no process waits for another. One that fell
silent is named, with where it was last seen. What a process says before it ends is believed within seconds.

The store is the launcher's on the first machine, and ends with it. For the other machines that is the end of a
launcher, upon which a run saves and stops; where that cannot be done any more, silence follows.

The processes of one machine watch each other by their process ids: see ``interruption``.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from finetune.compat.python_private import frame_of
from finetune.compat.torch_private import store_of_launch

LOOK_SECONDS = 0.5
BEAT_SECONDS = 5.0
SILENCE_SECONDS = 300.0
"""After which a process counts as lost: one that is busy with a large file may hold Python's lock for a while."""
GRACE_SECONDS = 5.0
"""After somebody's last words, in which others that end for the same reason can say it themselves."""
BEAT, LAST_WORDS = "finetune/heartbeat/{}", "finetune/last_words"
"""Keys of the store: of each process, and of whoever ended first."""
PACKAGE = Path(__file__).parent.parent


class Place(NamedTuple):
    """Where a process runs."""

    machine: tuple[str, ...]
    """Identity of the machine; in containers, of the container."""
    host: str
    pid: int


def prepare(rank: int) -> None:
    """Write this process's first sign of life. Every process must have done so before any listens."""
    store = store_of_launch()
    store.set(BEAT.format(rank), "0 the start")
    store.set(LAST_WORDS, "")


def standing(thread: int) -> str:
    """The innermost line of this package that a thread executes."""
    frame = frame_of(thread)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if PACKAGE in file.parents and file.parent.name != "compat":
            return f"{file.relative_to(PACKAGE.parent)}, line {frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return "a line outside of finetune"


class Heartbeat:
    """Beats until ``stop``, where there are other machines.

    Args:
        places: of all processes, by rank.
    """

    def __init__(self, places: Sequence[Place], rank: int) -> None:
        mine = places[rank].machine
        self.doing = "the start"
        """What the main thread is at, in words."""
        self.is_orphaned = False
        """The store is gone, and with it the launcher of the first machine."""
        self._rank = rank
        self._hosts = {other: place.host for other, place in enumerate(places) if place.machine != mine}
        self._listens = [place.machine for place in places].index(mine) == rank
        self._beats: Mapping[int, str] = {}
        self._last_words = ""
        self._known, self._since = dict.fromkeys(self._hosts, ""), dict.fromkeys(self._hosts, 0.0)
        self._waited, self._spoken = 0.0, 0.0
        self._stopped = threading.Event()
        if self._hosts:
            self._main = threading.get_ident()
            self._store, self._own = store_of_launch().clone(), store_of_launch().clone()  # one for each thread
            threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def _run(self) -> None:
        looks = 0
        try:
            while not self._stopped.wait(LOOK_SECONDS):
                if looks % round(BEAT_SECONDS / LOOK_SECONDS) == 0:
                    self._beat(looks)
                if self._listens:
                    self._last_words = self._store.get(LAST_WORDS).decode()
                looks += 1
        except RuntimeError:  # nobody listens at the other end; where the network is cut, the call above just waits
            self.is_orphaned = True

    def _beat(self, number: int) -> None:
        self._store.set(BEAT.format(self._rank), f"{number} {self.doing}, at {standing(self._main)}")
        if self._listens:
            found = self._store.multi_get([BEAT.format(other) for other in self._hosts])
            self._beats = {other: beat.decode() for other, beat in zip(self._hosts, found, strict=True)}

    def lost(self, seconds: float) -> str | None:
        """What happened to processes of other machines, in a clause; None as long as nothing did.

        To be called again and again, since time counts only while this process runs: it may have been stopped.

        Args:
            seconds: since the last call.
        """
        if not self._listens or not self._hosts:
            return None
        self._waited += seconds
        for other, beat in self._beats.items():
            if beat != self._known[other]:
                self._known[other], self._since[other] = beat, self._waited
        if self._last_words:
            self._spoken += seconds
            if self._spoken > GRACE_SECONDS:
                return self._last_words
        silent = [other for other, since in self._since.items() if self._waited - since > SILENCE_SECONDS]
        if not silent:
            return None
        _, _, last = self._known[silent[0]].partition(" ")
        heard = f"nothing was heard of {self._named(silent)} for {SILENCE_SECONDS:.0f} s"
        return f"{heard}, last seen in {last or 'the start'}: the machine or the network is lost"

    def _named(self, ranks: Sequence[int]) -> str:
        hosts = ", ".join(dict.fromkeys(self._hosts[rank] for rank in ranks))
        numbers = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        return f"process{'es' if len(ranks) > 1 else ''} {numbers} on {hosts}"

    def tell_of_death(self, words: str) -> None:
        """Tell the other machines, which wait for it, that a process of this one died."""
        if self._hosts:
            self._say(lambda: self._own.set(LAST_WORDS, words))

    def tell_of_error(self, words: str) -> None:
        """Tell them that this process ends before the others do; not if anybody ended before, which may be why."""
        if self._hosts:
            self._say(lambda: self._own.compare_set(LAST_WORDS, "", words))

    def _say(self, words: Callable[[], object]) -> None:
        self.stop()
        with suppress(RuntimeError):  # nobody is there to hear it
            words()

    def stop(self) -> None:
        """Say nothing any more."""
        self._stopped.set()
