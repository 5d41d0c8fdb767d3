"""What was measured, for the terminal and, in Markdown, for a README."""

from statistics import median
from typing import Any

Point = dict[str, Any]

PART_NAMES = {
    "prefill": "prefill", "decode": "decode", "rewards": "rewards", "update": "forward + backward",
    "optimizer": "optimizer", "refresh": "refresh of the rollout copy", "other": "the rest",
}  # fmt: skip


def shown(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"


def describe(point: Point) -> str:
    s = point["settings"]
    return (
        f"{s['size']} on {s['device']}, mode {s['mode']}, {s['prompts']} prompts x {s['group']} completions "
        f"x {s['new_tokens']} new tokens, {s['width']}x{s['height']} images, "
        f"{s['prompts_per_row']} prompts a row"
    )


def where(point: Point) -> str:
    packages = ", ".join(f"{name} {number}" for name, number in point["versions"].items())
    return f"{point['machine']}; {packages}; commit {point['commit']}, {point['date']}."


def memory(sizes: dict[str, float]) -> str:
    return ", ".join(f"{size:.1f} GiB {kind}" for kind, size in sizes.items())


# --- the terminal


def terminal(result: Point | list[Point]) -> str:
    points = result if isinstance(result, list) else [result]
    return "\n\n".join(_lines(point) for point in points)


def _lines(point: Point) -> str:
    if "weights" in point:
        return _weights_lines(point)
    if "flat" in point:
        return _flat_lines(point)
    if "selfcheck" in point:
        return _selfcheck_lines(point)
    lines = [describe(point)]
    for side in ("product", "trl"):
        found = point.get(side)
        if found and "error" in found:
            lines.append(f"  {side:<8} {found['error']}")
        elif found:
            more = f"first {shown(found['first_update_s'])}; peak {memory(found['peak_gib'])}"
            more += f"; {shown(found['processor_s'])} of processor time"
            lines.append(f"  {side:<8} {shown(found['update_s']):>9}  ({more})")
    lines.append(f"  floor    {shown(point['floor_s']):>9}")
    if point["ratio"]:
        more = f"{point['processor_ratio']:.1f} x in processor time"
        lines.append(f"  ratio    {point['ratio']:>7.1f} x  ({more})")
    for part, seconds in point.get("product", {}).get("parts_s", {}).items():
        least = point["floor_parts_s"].get(part)
        lines.append(f"    {PART_NAMES[part]:<28} {shown(seconds):>9}   floor {shown(least)}")
    lines += [f"    {name:<28} {shown(s):>9}" for name, s in _smaller(point)]
    return "\n".join(lines)


def _smaller(point: Point) -> list[tuple[str, float]]:
    """Figures that compare between updates of different sizes."""
    names = {"decode_step_s": "a decode step", "update_per_prompt_s": "forward + backward a prompt"}
    product = point.get("product", {})
    return [(name, product[key]) for key, name in names.items() if key in product]


def _flat_lines(point: Point) -> str:
    flat = point["flat"]
    if "error" in flat:
        return f"{describe(point)}\n  {flat['error']}"
    lines = [f"{describe(point)} at most: {len(flat['updates'])} updates of the product"]
    for name in ("first_third", "last_third"):
        third = flat[name]
        lines.append(
            f"  {name.replace('_', ' '):<12} {shown(third['update_s']):>9} an update, "
            f"{third['mean_tokens']:.0f} tokens a completion, {memory(third['gib'])}"
        )
    at = ", ".join(map(str, flat["compiled_at"])) or "none"
    return "\n".join([*lines, f"  updates that compiled: {at}"])


def _weights_lines(point: Point) -> str:
    found = point["weights"]
    lines = [f"{describe(point)}, token weights {point['settings']['token_weights']}"]
    if "error" in found:
        return f"{lines[0]}\n  {found['error']}"
    for name, times in (("by the clock", found["update_s"]), ("of the processor", found["processor_s"])):
        lines.append(
            f"  {name:<17} {shown(times['weighed']):>9} with, {shown(times['plain']):>9} without: "
            f"{times['added']:+.1%}"
        )
    return "\n".join([*lines, f"  views             {shown(found['views_s']):>9}"])


def _selfcheck_lines(point: Point) -> str:
    found = point["selfcheck"]
    s = point["settings"]
    title = f"{s['size']} on {s['device']}, self-check, answers of {s['new_tokens']} tokens"
    if "error" in found:
        return f"{title}\n  {found['error']}"
    lines = [title]
    for name in ("product", "generate"):
        one = found[name]
        lines.append(
            f"  {name:<8} {one['images_per_s']:8.1f} images/s  ({one['images']} images in batches of "
            f"{one['batch']}; the first batch took {shown(one['first_batch_s'])})"
        )
    return "\n".join([*lines, f"  ratio    {found['ratio']:8.1f} x"])


def flat_thirds(updates: list[dict[str, float]]) -> dict[str, Any]:
    """First and last third of a flat run, and the updates (from 1) in which something was compiled."""
    count = max(1, len(updates) // 3)
    kinds = [kind for kind in updates[0] if kind not in ("s", "graphs", "tokens")]

    def third(rows: list[dict[str, float]]) -> dict[str, Any]:
        return {
            "update_s": median(row["s"] for row in rows),
            "mean_tokens": sum(row["tokens"] for row in rows) / len(rows),
            "gib": {kind: max(row[kind] for row in rows) for kind in kinds},
        }

    before = [0, *(row["graphs"] for row in updates)]
    compiled = [i for i, row in enumerate(updates, start=1) if row["graphs"] > before[i - 1]]
    return {
        "first_third": third(updates[:count]), "last_third": third(updates[-count:]), "compiled_at": compiled,
    }  # fmt: skip


# --- Markdown


def table(result: Point | list[Point]) -> str:
    """The tables of a result of step.py: updates, parts, self-check, flat run, and where it was measured."""
    points = result if isinstance(result, list) else [result]
    updates = [point for point in points if "floor_s" in point]
    parts = [point for point in updates if "parts_s" in point.get("product", {})]
    checks = [point for point in points if "selfcheck" in point]
    flats = [point for point in points if "flat" in point]
    blocks = [_update_table(updates)] if updates else []
    blocks += [_parts_table(point) for point in parts]
    blocks += [_selfcheck_table(checks)] if checks else []
    blocks += [f"```\n{_flat_lines(point)}\n```" for point in flats]
    blocks += [f"```\n{_weights_lines(point)}\n```" for point in points if "weights" in point]
    return "\n\n".join([*blocks, where(points[0])])


def _rows(header: str, rows: list[list[str]]) -> str:
    columns = header.split(" | ")
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _update_table(points: list[Point]) -> str:
    rows = []
    for point in points:
        sides = [point.get(name, {}) for name in ("trl", "product")]
        cells = [describe(point), *(side.get("error") or shown(side.get("update_s")) for side in sides)]
        cells += [f"{point['ratio']:.1f} x" if point["ratio"] else "-", shown(point["floor_s"])]
        cells += [memory(side.get("peak_gib", {})) or "-" for side in sides]
        rows.append(cells)
    header = "work | TRL | product | ratio | floor | peak memory, TRL | peak memory, product"
    return _rows(header, rows)


def _parts_table(point: Point) -> str:
    parts, floors = point["product"]["parts_s"], point["floor_parts_s"]
    rows = [[PART_NAMES[part], shown(s), shown(floors.get(part))] for part, s in parts.items()]
    rows += [[name, shown(s), "-"] for name, s in _smaller(point)]
    return f"Parts of the product, {describe(point)}:\n\n" + _rows("part | time | floor", rows)


def _selfcheck_table(points: list[Point]) -> str:
    rows = []
    for point in points:
        found = point["selfcheck"]
        if "error" in found:
            rows.append([str(point["settings"]["new_tokens"]), found["error"], "-", "-"])
            continue
        cells = [f"{found[name]['images_per_s']:.1f}" for name in ("generate", "product")]
        rows.append([str(point["settings"]["new_tokens"]), *cells, f"{found['ratio']:.1f} x"])
    return _rows("tokens of an answer | images/s, `generate` | images/s, product | ratio", rows)
