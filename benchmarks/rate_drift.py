"""What each codec costs in bytes and in drift, on one real base and fine-tune.

    python benchmarks/rate_drift.py --base FOLDER --variant FOLDER --text FILE.jsonl [--only WORD] [--again]

Deltas of the linear layers alone are stored; embeddings, head and norms are the variant's own. Drift is that of what is
served: base plus delta in fp32, never rounded in between. Text: `prompt` and `canonical_solution` of every line, joined
by a blank line, the first 2,048 tokens in four windows of 512, no BOS. KL is that of the variant's distribution to the
stored one's, in nats a token. `relative` is KL over that of low rank bf16 r 16: training runs differ, ratios less so.

Results are kept row by row in results/rate_drift.json; rows that are there are not measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, machine, say, versions, write_result
from rate_drift_rows import Pair, Row, rows
from residuals import Checkpoint, linear_layers
from safetensors import safe_open

PACKAGES = ("mfs_decompose", "torch", "transformers", "safetensors", "numpy", "constriction")
TOKENS, WINDOW = 2048, 512
REFERENCE = "low rank bf16 r 16"
NAME = "rate_drift"


def read_pair(base: Path, variant: Path) -> Pair:
    """The linear layers of both, in the dtypes they are stored in."""
    names = list(linear_layers(Checkpoint(base)))
    return Pair(*(({name: found[name] for name in names}) for found in (_tensors(base), _tensors(variant))))


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118  (not a dict)
    return found


def read_windows(variant: Path, text: Path) -> torch.Tensor:
    """Token ids [4, 512]."""
    from transformers import AutoTokenizer

    documents = [json.loads(line) for line in text.read_text().splitlines() if line]
    joined = "\n\n".join(one["prompt"] + one["canonical_solution"] for one in documents)
    ids = AutoTokenizer.from_pretrained(variant)(joined, add_special_tokens=False)["input_ids"][:TOKENS]
    return torch.tensor(ids).view(-1, WINDOW)


class Judge:
    """The variant's own distribution over the text, and a model whose linear layers can be replaced."""

    def __init__(self, variant: Path, windows: torch.Tensor) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(variant, dtype=torch.float32).eval()
        self._parameters = dict(self._model.named_parameters())
        self._windows = windows
        self._original = [logs for logs, _ in self._predict()]

    def _predict(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for window in self._windows:
            logs = torch.log_softmax(self._model(window[None]).logits[0, :-1], dim=-1)
            yield logs, window[1:]

    def put(self, name: str, weight: torch.Tensor) -> None:
        self._parameters[name].copy_(weight)

    def drift(self) -> dict[str, float]:
        divergence, agree, own, other = [], [], [], []
        for original, (logs, targets) in zip(self._original, self._predict(), strict=True):
            divergence.append((original.exp() * (original - logs)).to(torch.float64).sum(dim=-1))
            agree.append((original.argmax(dim=-1) == logs.argmax(dim=-1)).to(torch.float64))
            own.append(-original.gather(1, targets[:, None]).to(torch.float64))
            other.append(-logs.gather(1, targets[:, None]).to(torch.float64))
        means = [float(torch.cat(values).mean()) for values in (divergence, agree, own, other)]
        return {"kl": means[0], "top1": means[1], "ppl_drift": math.expm1(means[3] - means[2])}


def measure_row(pair: Pair, judge: Judge, row: Row) -> dict[str, Any]:
    started, nbytes, errors, energies = time.perf_counter(), 0, [], []
    for decoded in row(pair):
        delta = pair.delta(decoded.name).to(torch.float64)
        errors.append(float((decoded.delta.to(torch.float64) - delta).square().sum()))
        energies.append(float(delta.square().sum()))
        nbytes += decoded.nbytes
        base = pair.base[decoded.name].to(torch.float64)
        judge.put(decoded.name, (base + decoded.delta).to(torch.float32))
    coded = time.perf_counter() - started
    error = math.sqrt(math.fsum(errors) / math.fsum(energies))
    sizes = {"bytes": nbytes, "share": nbytes / pair.nbytes, "rel_error": error}
    return {**sizes, **judge.drift(), "seconds": round(coded, 1)}


def show(results: dict[str, dict[str, Any]]) -> str:
    """The table as Markdown."""
    reference = results.get(REFERENCE, {}).get("kl", math.nan)
    lines = [
        "| codec | % of linears | rel. error | ppl drift | KL | relative | top-1 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, one in results.items():
        cells = [name, f"{100 * one['share']:.2f}", f"{one['rel_error']:.3f}", f"{one['ppl_drift']:+.2%}"]
        cells += [f"{one['kl']:.2e}", f"{one['kl'] / reference:.3f}", f"{one['top1']:.3f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--variant", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True, help="a .jsonl with prompt and canonical_solution")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--again", action="store_true", help="measure rows that are there already once more")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name", default=NAME, help="of the file in results/")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    path = RESULTS / f"{args.name}.json"
    kept: dict[str, dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else {}
    table = rows()
    wanted = [name for name in table if args.only in name and (args.again or name not in kept)]
    if wanted:
        pair, windows = read_pair(args.base, args.variant), read_windows(args.variant, args.text)
        judge = Judge(args.variant, windows)
        for name in wanted:
            kept[name] = measure_row(pair, judge, table[name])
            say(f"{name}: {kept[name]['share']:.4f}, KL {kept[name]['kl']:.3e}")
            ordered = {one: kept[one] for one in table if one in kept}
            about = {"machine": machine(), "versions": versions(Path(sys.executable), PACKAGES)}
            setting = {"tokens": TOKENS, "window": WINDOW, "text": args.text.name, "linears_bytes": pair.nbytes}
            write_result(args.name, {**about, **setting, "rows": ordered})
    sys.stdout.write(show({one: kept[one] for one in table if one in kept}))


if __name__ == "__main__":
    main()
