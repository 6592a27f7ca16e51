"""Text of `memory.py`: its tables, and what has changed although offload and sharding must leave it alone."""

from __future__ import annotations

from typing import Any

SHARE = 0.1  # mean difference of fp32 weights, FSDP2 against plain, in units of how far these moved
Results = dict[str, Any]


def gib(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


SHARED_HEADER = (
    f"{'':<14}{'rollout, GiB':>28}{'update, GiB':>28}{'offload, step':>24}{'seconds':>18}{'sync':>8}\n"
    f"{'shared':<14}{'before':>10}{'peak':>8}{'reserved':>10}{'before':>10}{'peak':>8}{'reserved':>10}"
    f"{'bytes':>15}{'seconds':>9}{'rollout':>10}{'update':>8}{'bytes':>8}"
)
FSDP_HEADER = (
    f"{'':<32}{'update':>9}{'GiB':>8}{'':>8}{'':>10}{'|Δ| to plain, fp32':>20}{'policy':>10}\n"
    f"{'one rank':<32}{'seconds':>9}{'between':>8}{'peak':>8}{'reserved':>10}{'max':>10}{'mean':>10}{'max':>10}"
)


def shared_line(row: Results) -> str:
    phases = "".join(
        f"{gib(row[phase]['held_gib']):>10}{gib(row[phase]['peak_gib']):>8}{gib(row[phase]['reserved_gib']):>10}"
        for phase in ("rollout", "update")
    )
    name = "offload" if row["offload"] else "no offload"
    moved = f"{row['offload_bytes']:>15,.0f}{row['offload_s']:>9.3f}"
    return f"{name:<14}{phases}{moved}{row['rollout_s']:>10.3f}{row['update_s']:>8.3f}{row['sync_bytes']:>8.0f}"


def fsdp_line(row: Results) -> str:
    gaps = f"{'–':>10}{'–':>10}{'–':>10}"
    if "fp32_gap" in row:
        gaps = f"{row['fp32_gap']['max']:>10.1e}{row['fp32_gap']['mean']:>10.1e}{row['weight_gap']['max']:>10.1e}"
    memory = f"{gib(row['held_gib']):>8}{gib(row['peak_gib']):>8}{gib(row['reserved_gib']):>10}"
    return f"{row['strategy']:<32}{row['update_s']:>9.3f}{memory}{gaps}"


def report(results: Results) -> str:
    """The tables of the sections that were run."""
    lines = [f"π0 {results['size']}, {results['device']}, torch {results['torch']}: {results['seconds']:.0f} s"]
    if shared := results.get("shared"):
        lines += ["", SHARED_HEADER, *map(shared_line, shared["runs"])]
        lines.append(
            f"{shared['steps']} steps, gradient norm {grad_norm(shared):.3g} in the last; a metric differs at most by "
            f"{shared['difference']:.1e} with offload, {shared['difference_by_itself']:.1e} without it twice"
        )
    if fsdp := results.get("fsdp"):
        lines += ["", FSDP_HEADER, *map(fsdp_line, fsdp)]
        moved = fsdp[0]["moved"]
        lines.append(
            f"the updates moved the fp32 weights by {moved['mean']:.1e} on average, at most {moved['max']:.1e}"
        )
    if copy := results.get("copy"):
        lines += ["", f"own weights of a rollout, {copy['parameter_bytes']:,} bytes"]
        for state in ("before", "away", "back"):
            lines.append(f"{state:<8}{gib(copy[f'{state}_gib']):>8} GiB, reserved {gib(copy[f'{state}_reserved_gib'])}")
        for way in ("offload", "onload"):
            rate, first = copy[f"{way}_gb_per_s"], copy[f"first_{way}_s"]
            lines.append(f"{way:<8}{copy[f'{way}_s']:>8.3f} s, {rate:.1f} GB/s (first time {first:.3f} s)")
        lines.append(f"the same noise gives {'equal' if copy['equal'] else 'OTHER'} actions, log-probs and values")
    return "\n".join(lines)


def grad_norm(shared: Results) -> float:
    """Of the last step: there was something to learn."""
    return shared["runs"][0]["metrics"][-1]["train/actor/grad_norm"]


def broken(results: Results) -> list[str]:
    """What has changed that must not."""
    found = [f"{section}: {error}" for section, error in results["errors"].items()]
    if shared := results.get("shared"):
        off, on = shared["runs"]
        if off["sync_bytes"] or on["sync_bytes"]:
            found.append("weights were synced in shared placement")
        if off["offload_bytes"] or not on["offload_bytes"]:
            found.append("offload moved bytes when it was off, or none when it was on")
        if shared["difference"] and not shared["difference_by_itself"]:
            found.append(f"offload changed a metric by {shared['difference']:.1e}")
    if fsdp := results.get("fsdp"):
        limit = SHARE * fsdp[0]["moved"]["mean"]
        found += [f"{row['strategy']} leads to other weights" for row in fsdp[1:] if row["fp32_gap"]["mean"] > limit]
    if copy := results.get("copy"):
        if not (copy["equal"] and copy["first_equal"]):
            found.append("a rollout answers differently after its weights came back")
        if not copy["offload_bytes"] == copy["onload_bytes"] >= copy["parameter_bytes"]:
            found.append("a rollout's weights did not leave whole")
    return found
