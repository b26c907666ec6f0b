"""Compare orders of pipelines with those that were published: bubbles and memory, by simulation.

Times of stages, and what the authors' own generators make of them, are from sail-sg's repository
zero-bubble-pipeline-parallelism (commits f68d387, 5234a81, 39f2c18, 064369d); V-Half and V-Min were
computed with a shortened copy of theirs. A bubble is the share of time in which the busiest device
is idle, from its first start to its last end. Memory is in micro-batches whose activations a device
holds; p is the number of devices. Times of equal stages are those of a whole device.
"""

from __future__ import annotations

import time

from _report import options, publish, table

from autosched.parallel import Order, order

# Devices, micro-batches; F, I, W and a copy in microseconds; bubbles of 1F1B, interleaved 1F1B and
# its stages per device, ZB-1p, ZB-2p, ZB-V.
ZERO_BUBBLE = [
    (8, 24, (18522, 18086, 9337), 601, 0.2431, 0.1090, 3, 0.1585, 0.0433, 0.0703),
    (8, 32, (18513, 18086, 9331), 626, 0.1985, 0.0847, 3, 0.1242, 0.0039, 0.0543),
    (8, 64, (18546, 18097, 9321), 762, 0.1240, 0.0461, 3, 0.0674, 0.0026, 0.0298),
    (8, 24, (29718, 29444, 19927), 527, 0.2347, 0.0827, 4, 0.1323, 0.0029, 0.0403),
    (8, 32, (29802, 29428, 19530), 577, 0.1898, 0.0644, 4, 0.1045, 0.0022, 0.0326),
    (8, 64, (29935, 29621, 19388), 535, 0.1091, 0.0328, 4, 0.0554, 0.0010, 0.0166),
    (16, 48, (11347, 11248, 8132), 377, 0.2552, 0.1136, 3, 0.1397, 0.0066, 0.0498),
    (16, 64, (11307, 11254, 8101), 379, 0.2082, 0.0878, 3, 0.1088, 0.0054, 0.0381),
    (16, 128, (11325, 11308, 8109), 378, 0.1251, 0.0459, 3, 0.0576, 0.0028, 0.0195),
    (32, 96, (10419, 10207, 7715), 408, 0.2646, 0.1528, 2, 0.1421, 0.0038, 0.0531),
    (32, 128, (10408, 10204, 7703), 408, 0.2168, 0.1192, 2, 0.1106, 0.0029, 0.0404),
]
# Bubbles of V-Half and V-Min.
LESS_MEMORY = [
    (4, 12, (1, 1, 1), 0, 0.0649, 0.1325),
    (8, 24, (1, 1, 1), 0, 0.1056, 0.1579),
    (16, 48, (1, 1, 1), 0, 0.1246, 0.1700),
    (8, 24, (18522, 18086, 9337), 601, 0.1702, 0.3353),
    (8, 64, (18546, 18097, 9321), 762, 0.0737, 0.2758),
    (8, 24, (29718, 29444, 19927), 527, 0.1447, 0.2721),
    (8, 64, (29935, 29621, 19388), 535, 0.0607, 0.2013),
    (16, 48, (11347, 11248, 8132), 377, 0.1682, 0.2927),
    (16, 64, (11307, 11254, 8101), 379, 0.1318, 0.2615),
]
# One stage per device: devices, micro-batches, seconds, copy, memory, published time.
TIMES = [
    (4, 12, (5, 6, 4), 0, 4, 201),
    (4, 12, (5, 6, 4), 0, 5, 193),
    (4, 12, (5, 6, 4), 0, 7, 183),
    (4, 12, (5478, 5806, 3534), 200, 16, 178898),
    (8, 24, (1, 1, 1), 0, 8, 79),
    (8, 24, (1, 1, 1), 0, 16, 72),
    (32, 16, (1, 1, 1), 0, 32, 95),
]
UNEVEN = (
    (30715, 29233, 29106, 29078, 28850, 28919, 28924, 41678),
    (31308, 29344, 29357, 29455, 29217, 29384, 29354, 38731),
    (18746, 18789, 19062, 19367, 19455, 19967, 20096, 32833),
)


def setting(p: int, m: int, seconds: tuple[int, ...], copy: float) -> tuple[str, str]:
    return f"{p}, {m}", " ".join(map(str, (*seconds, copy)))


def both(published: float, made: Order) -> str:
    return f"{published:.4f} / {made.bubble():.4f}"


def longest(made: Order) -> float:
    """Return the time of the device that takes longest."""
    work = max(
        sum(column[stage] for column in made.table for stage in range(len(made.devices))
            if made.devices[stage] == rank)
        for rank in range(len(made.rows))
    )  # fmt: skip
    return work * made.chunks / (1 - made.bubble())


def zero_bubbles(quick: bool) -> str:
    rows = []
    for p, m, seconds, copy, *published in ZERO_BUBBLE[: 4 if quick else None]:
        one, megatron, v, h1, h2, zbv = published
        how = {"seconds": seconds, "copy": copy}
        rows.append(
            (
                *setting(p, m, seconds, copy),
                both(one, order("1f1b", p, m, **how)),
                f"{both(megatron, order('interleaved', p, m, stages=v, **how))} ({v})",
                both(h1, order("zb-h1", p, m, **how)),
                both(zbv, order("zb-v", p, m, **how)),
                f"{order('best', p, m, memory=p, **how).bubble():.4f}",
                both(h2, order("zb-h2", p, m, **how)),
                f"{order('best', p, m, memory=2 * p, **how).bubble():.4f}",
            )
        )
    head = ("p, m", "F I W copy", "1F1B", "interleaved (v)", "ZB-1p", "ZB-V")
    return table((*head, "best, memory p", "ZB-2p", "best, 2p"), rows)


def less_memory(quick: bool) -> str:
    rows = []
    for p, m, seconds, copy, half, least in LESS_MEMORY[: 4 if quick else None]:
        cells = []
        for name, published in (("v-half", half), ("v-min", least)):
            made = order(name, p, m, seconds=seconds, copy=copy)
            memory = max(made.peak())
            best = order("best", p, m, seconds=seconds, copy=copy, memory=memory)
            cells += [f"{memory:g}", both(published, made), f"{best.bubble():.4f}"]
        rows.append((*setting(p, m, seconds, copy), *cells))
    return table(
        ("p, m", "F I W copy", "memory", "V-Half", "best", "memory", "V-Min", "best"), rows
    )


def times() -> str:
    rows = []
    for p, m, seconds, copy, memory, published in TIMES:
        made = order("best", p, m, seconds=seconds, copy=copy, memory=memory)
        cells = f"{memory}", f"{published:,}", f"{longest(made):,.6g}"
        rows.append((*setting(p, m, seconds, copy), *cells))
    made = order("best", 8, 32, seconds=UNEVEN, copy=473, memory=8)
    rows.append(("8, 32", "uneven stages, 473", "8", "3,623,744", f"{longest(made):,.0f}"))
    return table(("p, m", "F I W copy", "memory", "published", "best"), rows)


def speed(quick: bool) -> str:
    rows = []
    for p, m in ((8, 32),) if quick else ((8, 32), (16, 64), (32, 128)):
        for memory in (p, 2 * p):
            began = time.perf_counter()
            order("best", p, m, seconds=(5, 5, 4), copy=0.2, memory=memory)
            rows.append((f"{p}, {m}", f"{memory}", f"{time.perf_counter() - began:.1f} s"))
    return table(("p, m", "memory", "time to find the best"), rows)


def main() -> None:
    chosen = options(__doc__)
    order("best", 2, 4, seconds=(3, 2, 2), memory=1)  # compiles
    publish(
        "pipelines",
        "Orders of pipelines, compared with published ones",
        [
            " ".join((__doc__ or "").split("\n\n", 1)[1].split()),
            "Each cell has the published bubble, and ours.",
            zero_bubbles(chosen.quick),
            "V-Half and V-Min hold about a half and a third of what 1F1B does.",
            less_memory(chosen.quick),
            "The longest time of a device, with one stage per device as published; `best` tries two, too.",
            times(),
            speed(chosen.quick),
        ],
        chosen,
        packages=("numba", "numpy"),
    )


if __name__ == "__main__":
    main()
