"""Tables of measured points: for the terminal and, in Markdown, for a README."""

from typing import Any

PART_NAMES = {
    "prefill": "prefill", "decode": "decode", "rewards": "rewards", "update": "forward + backward",
    "optimizer": "optimizer", "refresh": "refresh of the rollout copy", "other": "the rest",
}  # fmt: skip


def shown(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"


def describe(point: dict[str, Any]) -> str:
    s = point["settings"]
    return (
        f"{s['size']} on {s['device']}, mode {s['mode']}, {s['prompts']} prompts x {s['group']} completions "
        f"x {s['new_tokens']} new tokens, {s['width']}x{s['height']} images, "
        f"{s['prompts_per_row']} prompts a row"
    )


def memory(side: dict[str, Any]) -> str:
    return ", ".join(f"{size:.1f} GiB {kind}" for kind, size in side["peak_gib"].items())


def summary(point: dict[str, Any]) -> str:
    """For the terminal, a few lines."""
    lines = [describe(point)]
    for side in ("product", "trl"):
        found = point.get(side)
        if found and "error" in found:
            lines.append(f"  {side:<8} {found['error']}")
        elif found:
            first = shown(found["first_update_s"])
            lines.append(f"  {side:<8} {shown(found['update_s']):>9}  (first {first}; peak {memory(found)})")
    lines.append(f"  floor    {shown(point['floor_s']):>9}")
    if point["ratio"]:
        lines.append(f"  ratio    {point['ratio']:>7.1f} x")
    for part, seconds in point.get("product", {}).get("parts_s", {}).items():
        least = point["floor_parts_s"].get(part)
        lines.append(f"    {PART_NAMES[part]:<28} {shown(seconds):>9}   floor {shown(least)}")
    return "\n".join(lines)


def table(result: dict[str, Any] | list[dict[str, Any]]) -> str:
    """Markdown: a line a point, then the parts of each that has them."""
    points = result if isinstance(result, list) else [result]
    lines = [
        "| work | TRL | product | ratio | floor | peak memory, TRL | peak memory, product |",
        "|---|---|---|---|---|---|---|",
    ]
    for point in points:
        ratio = f"{point['ratio']:.1f} x" if point["ratio"] else "-"
        cells = [describe(point), side_cell(point, "trl"), side_cell(point, "product"), ratio]
        cells += [shown(point["floor_s"]), memory_cell(point, "trl"), memory_cell(point, "product")]
        lines.append(f"| {' | '.join(cells)} |")
    for point in points:
        parts = point.get("product", {}).get("parts_s")
        if parts:
            lines += ["", f"Parts of the product, {describe(point)}:", ""]
            lines += ["| part | time | floor |", "|---|---|---|"]
            floors = point["floor_parts_s"]
            lines += [f"| {PART_NAMES[p]} | {shown(s)} | {shown(floors.get(p))} |" for p, s in parts.items()]
    return "\n".join([*lines, "", where(points[0])])


def where(point: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {number}" for name, number in point["versions"].items())
    return f"{point['machine']}; {packages}; commit {point['commit']}, {point['date']}."


def side_cell(point: dict[str, Any], side: str) -> str:
    return point.get(side, {}).get("error") or shown(point[f"{side}_s"])


def memory_cell(point: dict[str, Any], side: str) -> str:
    found = point.get(side, {})
    return memory(found) if "peak_gib" in found else "-"
