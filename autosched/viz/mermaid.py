"""Write a graph as text for Mermaid.

Code hosts show such text as a picture. Knows no coordinates and no times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from autosched.graph.graph import Graph
from autosched.viz.clusters import Cluster, clustered
from autosched.viz.diagram import Arrow, Box, diagram
from autosched.viz.format import legal

__all__ = ["graph_mermaid"]

_SHAPES = {"input": ("([", "])"), "task": ("[", "]"), "view": ("[", "]")}
_LINES = {"data": "-->", "move": "==>", "anti": "-.->", "order": "-.->"}
_EDGE_LABELS = {"anti": "write after read", "order": "order only"}
_CLASSES = (
    "classDef input fill:#ffffff,stroke:#59636e,color:#1f2328",
    "classDef task fill:#0072b2,stroke:#0072b2,color:#ffffff",
    "classDef view fill:#ffffff,stroke:#0072b2,color:#1f2328",
    "classDef critical stroke:#d55e00,stroke-width:4px",
)


def graph_mermaid(
    graph: Graph,
    device: Mapping[str, str] | None = None,
    *,
    title: str = "",
    group: str = "device",
    depth: int | None = None,
    most: float = 40,
    critical: Iterable[str] = (),
) -> str:
    """Write a graph as a Mermaid flowchart; parameters and appearance are those of ``graph_svg``.

    Copies to another device are thick arrows, order alone is a dotted arrow.

    >>> graph = Graph("one product")
    >>> x, w = graph.inputs("x", "w")
    >>> product = x @ w
    >>> print(graph_mermaid(graph).splitlines()[-1])
      n1 --> n2
    """
    found = diagram(graph, device, depth=depth, most=most, critical=critical)
    found, clusters = clustered(found, group)
    head = ["---", f'title: "{_yaml(title)}"', "---"] if _yaml(title) else []
    lines = [*head, "flowchart TD", *(f"  {text}" for text in _CLASSES)]
    for cluster in clusters:
        lines += _subgraph(cluster, found.boxes)
    lines += [f"  n{a} {_arrow(arrow)} n{b}" for (a, b), arrow in found.arrows.items()]
    marked = [i for i, arrow in enumerate(found.arrows.values()) if arrow.critical]
    if marked:
        lines.append(f"  linkStyle {','.join(map(str, marked))} stroke:#d55e00,stroke-width:4px")
    return "\n".join(lines) + "\n"


def _subgraph(cluster: Cluster, boxes: Sequence[Box]) -> Iterator[str]:
    inner = [f"  n{i}{_box(boxes[i])}" for i in cluster.boxes]
    if not cluster.name:
        yield from inner
        return
    yield f'  subgraph g{cluster.boxes[0]} ["{_entities(cluster.title)}"]'
    yield from ("  " + line for line in inner)
    yield "  end"


def _box(box: Box) -> str:
    left, right = _SHAPES[box.kind]
    label = _entities(box.label) + (f"<br>{box.amount}" if box.amount else "")
    return f'{left}"{label}"{right}:::{box.kind}' + ":::critical" * box.critical


def _arrow(arrow: Arrow) -> str:
    label = _EDGE_LABELS.get(arrow.kind)
    return _LINES[arrow.kind] + (f"|{label}|" if label else "")


def _entities(text: str) -> str:
    """Return text for Mermaid, with special characters as numeric entities.

    >>> _entities('layer1.0 "x"'), _entities("1. #")
    ('layer1.0 #34;x#34;', '#49;. #35;')
    """
    shown = "".join(c if c.isalnum() or c in " ._" else f"#{ord(c)};" for c in legal(text))
    # A leading number with a point would be read as a list.
    return f"#{ord(shown[0])};{shown[1:]}" if shown[:1].isdigit() else shown


def _yaml(title: str) -> str:
    """Return a title without characters that are special in YAML, which has no numeric entities."""
    return "".join(c for c in legal(title) if c.isprintable() and c not in '"\\').strip()
