"""What is served, as the runtime answers it: a variant of a loaded family in place of a restored checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mfs_decompose.fidelity.model import LoadedModel
from mfs_decompose.fidelity.settings import EvalSettings

if TYPE_CHECKING:
    from mfs_decompose.runtime.loaded import LoadedFamily


@dataclass(frozen=True, eq=False)
class ServedCandidate:
    """A variant in a loaded family; `folder` has its tokenizer."""

    family: LoadedFamily
    id: str
    folder: Path

    @classmethod
    def of(cls, family: LoadedFamily, id: str, folder: Path) -> ServedCandidate:
        """Write the variant's files, without weights, to a folder that is made."""
        files = family.variant(id).files
        for name in files.sizes:
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(files.read(name))
        return cls(family, id, folder)

    @property
    def vocabulary(self) -> int:
        return self.family.variant(self.id).vocabulary

    def model(self, role: str, settings: EvalSettings) -> LoadedModel:
        """The variant as a model to measure; calls of it wait for others of the family."""
        model = self.family.model
        return LoadedModel(
            network=_Network(self.family, self.id, self.vocabulary),
            role=role,
            device=str(model.device),
            vocabulary=self.vocabulary,
            max_positions=getattr(model.config.get_text_config(), "max_position_embeddings", None),
            padding=settings.padding,
        )


@dataclass(frozen=True)
class _Network:
    """Called as the transformers model is; its logits are cut to the variant's own vocabulary."""

    family: LoadedFamily
    id: str
    vocabulary: int

    def __call__(self, **inputs: Any) -> Any:
        with self.family.use(self.id) as model:
            output = model(**inputs)
        output.logits = output.logits[..., : self.vocabulary]
        return output


def load_served(
    artifact: Path, ids: Sequence[str], base: str | None, settings: EvalSettings, device: str
) -> LoadedFamily:
    """A family to be measured in, under the settings' dtype and attention.  Raises as `load_family` does."""
    from mfs_decompose.runtime.load import load_family

    family = load_family(artifact, variants=ids, base=base, device=device, dtype=settings.dtype)
    family.model.set_attn_implementation(settings.attention)
    return family
