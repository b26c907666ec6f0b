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
from autosched.program.clocks import Clocks, includes

__all__ = [
    "FREE",
    "ISSUE",
    "WAIT",
    "Frees",
    "Work",
    "emit",
    "free_due",
    "free_unused",
    "free_waited",
]

ISSUE, WAIT, FREE = range(3)  # kinds of issued items


class Work(NamedTuple):
    """The instructions to be ordered and the blocks to be freed. Streams are numbers.

    Instructions are runs and copies (and frees that make room). Ragged tables are pairs (CSR): row
    offsets, and the entries of all rows.
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
    known_ended_at: Any
    known_ended: Any  # [instruction], others that have ended when it ends


class Frees(NamedTuple):
    """The instructions issued so far, and the blocks that wait to be freed."""

    position: Any  # [instruction], its position on its stream
    clocks: Any  # [instruction, entry], its clock
    kind: Any  # [issued item], ISSUE, WAIT, FREE or a record
    item: Any  # [issued item], the instruction, block, or instruction waited for
    at: Any  # [issued item], the instruction with which it is issued
    issued: Any  # number of issued items
    # [block], the first use that does not happen before its owner's next instruction; -1 if there
    # is none, -2 before the first check
    pending: Any
    # For each owner and stream, a skew heap of (position, use, block), to be tried when the
    # owner's clock reaches that position.
    root: Any  # [owner, stream]
    due_at: Any  # [heap entry]
    use: Any
    block: Any
    left: Any
    right: Any
    entries: Any  # how many there are
    due: Any  # scratch space to sort entries
    watched: Any  # [stream], of single-copy streams, the last watch of a block that it uses
    earlier: Any  # [watch], the watch before
    watching: Any  # [watch], its block
    watches: Any  # how many there are

    @classmethod
    def of(cls, how: Mode, o: Work, streams: int, width: int) -> Frees:
        """Return the initial state."""
        count = len(o.own)
        blocks = len(o.owner)
        uses = len(o.uses)
        issued = count + len(o.after) + blocks
        # Waits for single-copy streams add entries; a copy uses at most two blocks.
        entries = uses + 2 * len(o.after) if width < streams else uses
        return cls(
            how.counts(count), how.small(count * width),
            how.counts(issued), how.counts(issued), how.counts(issued), how.counts(1),
            how.counts(blocks, -2), how.counts(width * width, -1),
            how.counts(entries), how.counts(entries), how.counts(entries), how.counts(entries),
            how.counts(entries), how.counts(1), how.counts(entries),
            how.counts(streams, -1), how.counts(uses), how.counts(uses), how.counts(1),
        )  # fmt: skip


@kernel
def emit(h: Frees, kind: int, item: int, at: int) -> None:
    """Issue one instruction, wait or free."""
    k = h.issued[0]
    h.kind[k] = kind
    h.item[k] = item
    h.at[k] = at
    h.issued[0] = k + 1


@kernel
def free_unused(o: Work, h: Frees, c: Clocks, at: int) -> None:
    """Free, if possible, the blocks that the current instruction uses last."""
    for k in range(o.ending_at[at], o.ending_at[at + 1]):
        try_free(o, h, c, o.ending[k], at)


@kernel
def free_waited(o: Work, h: Frees, c: Clocks, own: int, user: int, at: int) -> None:
    """Free blocks of a stream after it has waited for another.

    If the other is a single-copy stream, its blocks can also be freed after this wait.
    """
    if user >= c.width and c.last[user] >= 0:
        w = h.watched[user]
        while w >= 0:
            block = h.watching[w]
            if h.pending[block] >= 0 and o.own[h.pending[block]] == user:
                postpone(o, h, c, block, c.waiter[c.last[user]], c.since[c.last[user]])
            w = h.earlier[w]
    free_due(o, h, c, own, at)


@kernel
def try_free(o: Work, h: Frees, c: Clocks, block: int, at: int) -> None:
    """Free a block, or postpone it until its owner happens after the first remaining use.

    1. Find the first use that does not happen before the owner's next instruction.
    2. If its stream has an entry in clocks, try again when the owner's clock includes it.
    3. If it is on a single-copy stream, try again when the owner's clock includes any of the
       instructions that waited for that stream, or will wait for it.
    4. If there is none, free the block.
    """
    own = o.owner[block]
    for k in range(o.uses_at[block], o.uses_at[block + 1]):
        use = o.uses[k]
        user = o.own[use]
        if user == own or includes(c, c.clocks, own * c.width, user, h.position[use]):
            continue
        h.pending[block] = use
        if user < c.width:
            postpone(o, h, c, block, user, h.position[use])
            return
        w = h.watches[0]
        h.watching[w] = block
        h.earlier[w] = h.watched[user]
        h.watched[user] = w
        h.watches[0] = w + 1
        w = c.last[user]
        while w >= 0:
            postpone(o, h, c, block, c.waiter[w], c.since[w])
            w = c.previous[w]
        return
    h.pending[block] = -1
    emit(h, FREE, block, at)


@kernel
def postpone(o: Work, h: Frees, c: Clocks, block: int, user: int, position: int) -> None:
    """Try a block again when its owner happens after a position of a stream."""
    e = h.entries[0]
    h.due_at[e] = position
    h.use[e] = h.pending[block]
    h.block[e] = block
    h.left[e] = -1
    h.right[e] = -1
    h.entries[0] = e + 1
    heap = o.owner[block] * c.width + user
    h.root[heap] = melded(h, h.root[heap], e)


@kernel
def melded(h: Frees, a: int, b: int) -> int:
    """Return the union of two skew heaps (Sleator, Tarjan, SIAM J. Computing 15(1), 1986)."""
    root = parent = -1
    while a >= 0 and b >= 0:
        if (h.due_at[b], h.use[b], h.block[b]) < (h.due_at[a], h.use[a], h.block[a]):
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
def free_due(o: Work, h: Frees, c: Clocks, own: int, at: int) -> None:
    """Free blocks of a stream whose clock has advanced, ordered by stream, use and block."""
    count = 0
    base = own * c.width
    for user in range(c.width if own < c.width else 0):
        entry = h.root[base + user]
        while entry >= 0 and h.due_at[entry] <= c.clocks[base + user]:
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
        if h.pending[h.block[entry]] == h.use[entry]:
            try_free(o, h, c, h.block[entry], at)
