"""How many bytes a shared delta saves at equal KL: `known` against `shared` over a ladder of budgets.

    python benchmarks/shared_base.py BASE VARIANTS --text FILE[:field] --out result.json

VARIANTS is a folder of variants that were trained from one common intermediate checkpoint, each a folder of its own.
Each mode is decomposed at every budget into WORK, measured with `mfs eval` (served), and left there: a second call goes
on where the first one stopped. Saved bytes are read off log KL against log bytes, straight lines between the points.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from measure import machine, mfs, versions

BUDGETS = ("1%", "2%", "3%", "5%", "8%", "12%")
PACKAGES = ("mfs_decompose", "torch", "transformers", "safetensors", "numpy", "constriction")
MODES = ("known", "shared")


def measure(asked: argparse.Namespace, mode: str, budget: str) -> dict[str, Any]:
    """One cell: bytes of the deltas and what each variant drifts."""
    out = asked.work / f"{mode}-{budget.rstrip('%')}"
    variants = [f"{folder.name}={folder}" for folder in sorted(asked.variants.iterdir()) if folder.is_dir()]
    codec = ["--codec", asked.codec] if asked.codec else []
    given = ["--base", asked.base, "--variants", *variants, "--out", out, "--base-store", "reference"]
    mfs("decompose", *given, "--base-mode", mode, "--budget", budget, *codec, "--threads", asked.threads)
    inspected = json.loads(mfs("inspect", out, "--json"))
    originals = [word for one in variants for word in ("--originals", one)]
    texts = [word for text in asked.text for word in ("--text", text)]
    wanted = ["--through", "served", "--max-tokens", asked.tokens, "--base", asked.base]
    measured = json.loads(mfs("eval", out, *texts, *originals, *wanted, "--json"))
    bytes_of = {one["id"]: one["bytes"] + one["shared_bytes"] for one in inspected["variants"]}
    return {
        "mode": mode,
        "budget": budget,
        "bytes": sum(bytes_of.values()),
        "shared_bytes": inspected.get("shared", {}).get("bytes", 0),
        "variants": [
            {"id": one["variant"], "corpus": one["corpus"], "bytes": bytes_of[one["variant"]], "kl": one["kl_mean"]}
            for one in measured["results"]
        ],
    }


def bytes_at(points: Sequence[tuple[float, float]], kl: float) -> float | None:
    """Bytes at a KL, between the two points around it; None outside of them."""
    ordered = sorted(points)
    for (few, high), (many, low) in pairwise(ordered):
        if low <= kl <= high and low < high:
            part = math.log(high / kl) / math.log(high / low)
            return math.exp(math.log(few) + part * math.log(many / few))
    return None


def savings(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each KL that `known` reaches: the bytes of either mode, and the share that is saved."""
    means = {mode: [(c["bytes"], _mean_kl(c)) for c in cells if c["mode"] == mode] for mode in MODES}
    rows = []
    for nbytes, kl in sorted(means["known"]):
        other = bytes_at(means["shared"], kl)
        saved = None if other is None else 1 - other / nbytes
        rows.append({"kl": kl, "known_bytes": nbytes, "shared_bytes": other, "saved": saved})
    return rows


def _mean_kl(cell: dict[str, Any]) -> float:
    return math.fsum(one["kl"] for one in cell["variants"]) / len(cell["variants"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("variants", type=Path)
    parser.add_argument("--text", action="append", required=True)
    parser.add_argument("--work", type=Path, default=Path("shared-base"))
    parser.add_argument("--out", type=Path, default=Path("shared_base.json"))
    parser.add_argument("--budgets", nargs="+", default=BUDGETS)
    parser.add_argument("--shared-budgets", nargs="+", help="those of `shared`, if it is to have others")
    parser.add_argument("--codec", default="")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    wanted = {"known": asked.budgets, "shared": asked.shared_budgets or asked.budgets}
    result: dict[str, Any] = {
        "schema": "mfs.bench.shared_base/1",
        "machine": machine(),
        "versions": versions(Path(sys.executable), PACKAGES),
        "tokens": asked.tokens,
        "texts": [Path(text).name for text in asked.text],
    }
    cells = [measure(asked, mode, budget) for mode in MODES for budget in wanted[mode]]
    result |= {"cells": cells, "savings": savings(cells)}
    asked.out.write_text(json.dumps(result, indent=2) + "\n")
    for row in savings(cells):
        saved = "outside of what was measured" if row["saved"] is None else f"{row['saved']:.1%} saved"
        sys.stdout.write(f"KL {row['kl']:.3g}: known {row['known_bytes']:,} bytes, {saved}\n")


if __name__ == "__main__":
    main()
