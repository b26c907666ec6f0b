"""Free memory blocks after their last use.

A block is freed on the stream that allocated it, when all its uses happen before. A free never adds
a wait while the program has work to do: it is placed at the first point where existing waits order
it after every use. Blocks that remain are freed with waits at the end (``ending``). This trades
some memory for time. The functions here are kernels, which ``events`` calls while it walks the
program.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from autosched._lib.jit import Mode, kernel
from autosched.program.clock_kernels import Moments, reaches

__all__ = ["DO", "FREE", "WAIT", "Held", "Order", "emit", "ended", "release", "waited"]

DO, WAIT, FREE = range(3)  # kinds of issued items


class Order(NamedTuple):
    """The instructions to be ordered and the blocks to be freed. Streams are numbers.

    Instructions are runs and copies (and frees that make room). Ragged tables are pairs: where each
    row begins, and the entries of all rows.
    """

    own: Any  # [instruction], its stream
    also: Any  # and its second, -1 if it has none
    after_at: Any
    after: Any  # [instruction], its predecessors
    owner: Any  # [block], the stream that frees it
    uses_at: Any
    uses: Any  # [block], the last instruction of each stream that uses it
    ending_at: Any
    ending: Any  # [instruction], blocks that it uses last


class Held(NamedTuple):
    """The instructions issued so far, and the blocks that wait to be freed."""

    position: Any  # [instruction], its position on its stream
    behind: Any  # [instruction, place], its clock
    kind: Any  # [issued item], DO, WAIT, FREE or a record
    item: Any  # [issued item], the instruction, block, or instruction waited for
    line: Any  # [issued item], the instruction with which it is issued
    issued: Any  # number of issued items
    # [block], the first use that does not happen before its owner's next instruction; -1 if there
    # is none, -2 before the first check
    stuck: Any
    # For each owner and stream, a skew heap of (position, use, block), to be tried when the
    # owner's clock reaches that position.
    root: Any  # [owner, place]
    at: Any  # [entry]
    use: Any
    block: Any
    left: Any
    right: Any
    entries: Any  # how many there are
    due: Any  # scratch space to sort entries
    watched: Any  # [stream], of single-copy streams, the last entry of a block that it uses
    earlier: Any  # [such an entry], the entry before
    watching: Any  # [such an entry], its block
    watches: Any  # how many there are

    @classmethod
    def of(cls, how: Mode, o: Order, streams: int, places: int) -> Held:
        """Return the initial state."""
        count = len(o.own)
        blocks = len(o.owner)
        uses = len(o.uses)
        issued = count + len(o.after) + blocks
        entries = (
            uses + 2 * len(o.after) if places < streams else uses
        )  # a copy uses at most two blocks
        return cls(
            how.counts(count), how.small(count * places),
            how.counts(issued), how.counts(issued), how.counts(issued), how.counts(1),
            how.counts(blocks, -2), how.counts(places * places, -1),
            how.counts(entries), how.counts(entries), how.counts(entries), how.counts(entries), how.counts(entries),
            how.counts(1), how.counts(entries),
            how.counts(streams, -1), how.counts(uses), how.counts(uses), how.counts(1),
        )  # fmt: skip


@kernel
def emit(h: Held, kind: int, item: int, line: int) -> None:
    """Issue one instruction, wait or free."""
    k = h.issued[0]
    h.kind[k] = kind
    h.item[k] = item
    h.line[k] = line
    h.issued[0] = k + 1


@kernel
def ended(o: Order, h: Held, m: Moments, line: int) -> None:
    """Free, if possible, the blocks that the current instruction uses last."""
    for k in range(o.ending_at[line], o.ending_at[line + 1]):
        tried(o, h, m, o.ending[k], line)


@kernel
def waited(o: Order, h: Held, m: Moments, own: int, user: int, line: int) -> None:
    """Free blocks of a stream after it has waited for another.

    Also note which streams have waited for a single-copy stream.
    """
    if user >= m.places and m.last[user] >= 0:
        w = h.watched[user]
        while w >= 0:
            block = h.watching[w]
            if h.stuck[block] >= 0 and o.own[h.stuck[block]] == user:
                hold(o, h, m, block, m.waiter[m.last[user]], m.since[m.last[user]])
            w = h.earlier[w]
    release(o, h, m, own, line)


@kernel
def tried(o: Order, h: Held, m: Moments, block: int, line: int) -> None:
    """Free a block, or hold it until its owner happens after the first remaining use."""
    own = o.owner[block]
    for k in range(o.uses_at[block], o.uses_at[block + 1]):
        use = o.uses[k]
        user = o.own[use]
        if user == own or reaches(m, m.behind, own * m.places, user, h.position[use]):
            continue
        h.stuck[block] = use
        if user < m.places:
            hold(o, h, m, block, user, h.position[use])
            return
        w = h.watches[0]
        h.watching[w], h.earlier[w], h.watched[user] = block, h.watched[user], w
        h.watches[0] = w + 1
        w = m.last[user]
        while w >= 0:
            hold(o, h, m, block, m.waiter[w], m.since[w])
            w = m.before[w]
        return
    h.stuck[block] = -1
    emit(h, FREE, block, line)


@kernel
def hold(o: Order, h: Held, m: Moments, block: int, user: int, position: int) -> None:
    """Let a block be tried again when its owner happens after a position of a stream."""
    e = h.entries[0]
    heap = o.owner[block] * m.places + user
    h.at[e], h.use[e], h.block[e], h.left[e], h.right[e] = position, h.stuck[block], block, -1, -1
    h.entries[0] = e + 1
    h.root[heap] = melded(h, h.root[heap], e)


@kernel
def melded(h: Held, a: int, b: int) -> int:
    """Return the union of two skew heaps (Sleator, Tarjan, SIAM J. Computing 15(1), 1986)."""
    root = parent = -1
    while a >= 0 and b >= 0:
        if (h.at[b], h.use[b], h.block[b]) < (h.at[a], h.use[a], h.block[a]):
            a, b = b, a
        if parent < 0:
            root = a
        else:
            h.left[parent] = a
        parent = a
        a = h.right[a]
        h.right[parent] = h.left[parent]
    rest = max(a, b)
    if parent < 0:
        return rest
    h.left[parent] = rest
    return root


@kernel
def release(o: Order, h: Held, m: Moments, own: int, line: int) -> None:
    """Free blocks of a stream whose clock has advanced, ordered by stream, use and block."""
    count = 0
    base = own * m.places
    for user in range(m.places if own < m.places else 0):
        entry = h.root[base + user]
        while entry >= 0 and h.at[entry] <= m.behind[base + user]:
            key = o.own[h.use[entry]], h.use[entry], h.block[entry]
            k = count
            while (
                k > 0
                and (o.own[h.use[h.due[k - 1]]], h.use[h.due[k - 1]], h.block[h.due[k - 1]]) > key
            ):
                h.due[k] = h.due[k - 1]
                k -= 1
            h.due[k] = entry
            count += 1
            entry = melded(h, h.left[entry], h.right[entry])
        h.root[base + user] = entry
    for k in range(count):
        entry = h.due[k]
        if h.stuck[h.block[entry]] == h.use[entry]:
            tried(o, h, m, h.block[entry], line)
