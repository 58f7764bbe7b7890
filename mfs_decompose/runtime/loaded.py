"""A family in memory: the model, the variants that it answers for, and where their deltas are."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mfs_decompose.errors import UsageError
from mfs_decompose.runtime.batch_plan import BASE, BatchPlan, PlanSlot
from mfs_decompose.runtime.changes import Changes
from mfs_decompose.runtime.memory import Held, Memory, count_memory
from mfs_decompose.runtime.requests import VariantInfo
from mfs_decompose.runtime.tiers import Tiers
from mfs_decompose.source.side_files import SideFiles


@dataclass(frozen=True, eq=False)
class LoadedVariant:
    """The base, or a variant, of a loaded family.

    Attributes:
        slot: its number in a BatchPlan, BASE for the base.
        digest: of the weights it answers with; what is cached for it is cached under this, never under its name.
        vocabulary: how many token ids it has.
        stop_ids: ids that end its answers, from all files that name any.
        generation: its generation_config.json, empty where there is none.
        files: the files beside its weights.
        accounts: tensor -> the parameter that it serves, or why none.
    """

    id: str
    slot: int
    digest: bytes
    vocabulary: int
    stop_ids: tuple[int, ...]
    generation: Mapping[str, object]
    files: SideFiles
    accounts: Mapping[str, str]

    def load_tokenizer(self) -> Any:
        """Its tokenizer, by transformers, without network and foreign code.  Raises whatever transformers does."""
        from transformers import AutoTokenizer

        from mfs_decompose.source.quiet import quiet_transformers

        with tempfile.TemporaryDirectory() as folder, quiet_transformers():
            for name in self.files.sizes:
                place = Path(folder) / name
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(self.files.read(name))
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


@dataclass(frozen=True, eq=False)
class LoadedFamily:
    """A base in memory and the variants that it answers for.

    Attributes:
        model: the transformers model; call it inside `use`, or under a plan of `slot`.
        variants: by id, the base's is `base`.
        tiers: where the deltas of the variants are.
        digest: of the artifact.
    """

    model: Any
    slot: PlanSlot
    variants: Mapping[str, LoadedVariant]
    tiers: Tiers[Changes]
    ops: str
    digest: str

    def use(self, id: str) -> AbstractContextManager[Any]:
        """Calls of the model, which is given, answer as this variant inside, in any shape; other threads wait.

        Raises:
            UsageError: no such variant is loaded.
            NotReady: it cannot be brought to the device.
        """
        return self._using(id, self.variant(id).slot)

    @contextmanager
    def _using(self, id: str, slot: int) -> Iterator[Any]:
        with ExitStack() as held:
            held.enter_context(self.slot.alone())
            if slot != BASE:
                held.enter_context(self.tiers.using(id))
            held.enter_context(self.slot.use(BatchPlan.only(slot)))
            yield self.model

    def variant(self, id: str) -> LoadedVariant:
        """Raises UsageError where no such variant is loaded."""
        found = self.variants.get(id)
        if found is None:
            raise UsageError(f"expected a loaded variant, found {id[:80]!r}", hint=f"it has {', '.join(self.variants)}")
        return found

    def plan(self, ids: Sequence[str]) -> BatchPlan:
        """The plan of rows that belong to these variants, which must be on the device when it is used."""
        return BatchPlan.for_rows([self.variant(id).slot for id in ids])

    def infos(self) -> list[VariantInfo]:
        """The base and the variants as the engine wants them."""
        return [
            VariantInfo(one.id, one.slot, one.digest, one.vocabulary, frozenset(one.stop_ids))
            for one in self.variants.values()
        ]

    def memory(self) -> Memory:
        """Tensor bytes by part, of variants on the device or in host memory."""
        held = {id: _held(changes) for id, changes in self.tiers.held().items()}
        order = {id: held[id] for id in self.variants if id in held}
        return count_memory(self._base_tensors(), order)

    def base_digest(self) -> str:
        """sha256 over all parameters and buffers of the base, in order: the same however often it answered."""
        digest = hashlib.sha256()
        for tensor in self._base_tensors():
            digest.update(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def _base_tensors(self) -> Iterator[torch.Tensor]:
        yield from self.model.parameters()
        yield from self.model.buffers()


def _held(changes: Changes) -> Held:
    placed = [one for change in changes.values() for one in change.placed()]
    return placed, [tensor for change in changes.values() for tensor in change.tensors()]
