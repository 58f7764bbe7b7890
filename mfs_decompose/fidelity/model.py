"""Load a causal language model from a checkpoint folder, whole or not at all, and ask it for logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mfs_decompose.errors import ArtifactInvalid, MfsError, ResourceShortage, SourceIncompatible, SourceNotFound
from mfs_decompose.fidelity.settings import EvalSettings, Padding
from mfs_decompose.fidelity.windows import Window
from mfs_decompose.source.architecture import language_model_class, language_model_loader, read_transformers_config
from mfs_decompose.source.checkpoint import Checkpoint, open_checkpoint
from mfs_decompose.source.quiet import quiet_transformers
from mfs_decompose.source.tensor_map import load_tensor_map

_NAMED = 5  # tensors named in a message; the rest are counted
_ALIGNMENT = 64  # bytes; what torch's own CPU allocator gives


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A transformers model in eval mode.

    Attributes:
        role: original, base, served or restored.
        vocabulary: token ids below this can be shown to it and asked of it.
        max_positions: the longest input its config allows; None where it does not say.
        padding: on which side of a shorter window in a batch padding goes.
    """

    network: Any
    role: str
    device: str
    vocabulary: int
    max_positions: int | None
    padding: Padding = "right"


def load_model(folder: Path, role: str, settings: EvalSettings, device: str = "cpu") -> LoadedModel:
    """Load safetensors weights and config of `folder` in `settings.dtype`, without network and foreign code.

    Which tensors the architecture would miss, leave out or drop is found out from the headers, before a weight is read.

    Raises:
        SourceNotFound: no such folder, or no config.json in it.
        SourceIncompatible: an original or base that transformers cannot load, or whose tensors are not exactly
            those of its architecture.
        ArtifactInvalid: the same of a served or restored checkpoint.
        ResourceShortage: out of memory.
    """
    _check_folder(folder, role)
    loader = _check_tensors(folder, role)
    try:
        with quiet_transformers():
            network, info = loader.from_pretrained(
                folder,
                dtype=getattr(torch, settings.dtype),
                attn_implementation=settings.attention,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                # Mismatches are then reported with all others below instead of by a bare RuntimeError.
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        _refuse_wrong_tensors(folder, role, info)
        _align(network)
        network = network.to(device).eval()
    except MfsError:
        raise
    except Exception as error:
        # Whatever else goes wrong comes from the files of the folder, in exceptions of several libraries.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in reason:
            raise ResourceShortage(
                f"not enough memory to load the {role} checkpoint {folder}",
                hint="close other programs, or use a CPU with more",
            ) from error
        raise _invalid(role, f"transformers cannot load the {role} checkpoint {folder}: {reason}") from error
    return LoadedModel(
        network=network,
        role=role,
        device=device,
        vocabulary=min(
            int(table.weight.shape[0])
            for table in (network.get_input_embeddings(), network.get_output_embeddings())
            if table is not None
        ),
        max_positions=getattr(network.config.get_text_config(), "max_position_embeddings", None),
        padding=settings.padding,
    )


@torch.inference_mode()
def predict_windows(model: LoadedModel, batch: Sequence[Window]) -> list[torch.Tensor]:
    """Logits at the scored positions of each window: one [T, V] a window, T = len(window.targets).

    Windows of unlike length are padded and masked, so that no real position sees padding; padded on the left they
    also get positions that count from their own first token.
    """
    longest = max(len(window.inputs) for window in batch)
    firsts = [longest - len(window.inputs) if model.padding == "left" else 0 for window in batch]
    ids_BS = torch.zeros((len(batch), longest), dtype=torch.long)
    mask_BS = torch.zeros((len(batch), longest), dtype=torch.long)
    for row, (window, first) in enumerate(zip(batch, firsts, strict=True)):
        ids_BS[row, first : first + len(window.inputs)] = torch.tensor(window.inputs)
        mask_BS[row, first : first + len(window.inputs)] = 1
    inputs = {"input_ids": ids_BS.to(model.device), "attention_mask": mask_BS.to(model.device)}
    if any(firsts):
        inputs["position_ids"] = (mask_BS.cumsum(-1) - 1).clamp(min=0).to(model.device)
    logits_BSV: torch.Tensor = model.network(**inputs, use_cache=False).logits
    ends = [first + len(window.inputs) for window, first in zip(batch, firsts, strict=True)]
    return [
        logits_BSV[row, end - len(window.targets) : end]
        for row, (window, end) in enumerate(zip(batch, ends, strict=True))
    ]


def _check_folder(folder: Path, role: str) -> None:
    if not folder.is_dir():
        raise SourceNotFound(
            f"expected the {role} checkpoint in a folder at {folder}, found none", hint="check the path"
        )
    if (folder / "adapter_config.json").exists():
        # transformers would load another model, the one that the adapter names, and put the adapter on top.
        raise _invalid(role, f"expected a full checkpoint in {folder}, found an adapter")
    if not (folder / "config.json").is_file():
        raise SourceNotFound(
            f"expected config.json in the {role} checkpoint {folder}, found none", hint="pass a transformers checkpoint"
        )


def _check_tensors(folder: Path, role: str) -> Any:
    """The loader of transformers for this checkpoint, all of whose tensors have a place in the model it makes."""
    try:
        checkpoint = open_checkpoint(folder, folder.name)
        config = read_transformers_config(checkpoint)
        model_class = language_model_class(checkpoint, config)
        # Quantised weights come with scales that only a loader's own quantiser knows the place of.
        plain = getattr(config, "quantization_config", None) is None
        complaints = _complaints(checkpoint, model_class) if plain else {}
    except MfsError as error:
        raise _invalid(role, f"transformers cannot load the {role} checkpoint {folder}: {error.message}") from error
    _refuse(folder, role, complaints)
    return language_model_loader(config)


def _complaints(checkpoint: Checkpoint, model_class: Any) -> dict[str, list[str]]:
    """What is wrong -> the tensors or parameters it is wrong with."""
    found = load_tensor_map(checkpoint, model_class)
    return {
        "missing": list(found.unfilled),
        "unexpected": list(found.unused),
        "dropped for another of the same place": list(found.shadowed),
        "of another shape": [_unlike(one.parameter, one.found, one.expected) for one in found.mismatched],
        "not to be joined": [f"{one.parameter} ({one.reason})" for one in found.failed],
    }


def _refuse_wrong_tensors(folder: Path, role: str, info: dict[str, Any]) -> None:
    """The same, as the load itself reports it: nothing passes because the map was wrong."""
    complaints = {
        "missing": list(info["missing_keys"]),
        "unexpected": list(info["unexpected_keys"]),
        "of another shape": [_unlike(*mismatch) for mismatch in info["mismatched_keys"]],
    }
    _refuse(folder, role, complaints)


def _unlike(name: str, found: Sequence[int], expected: Sequence[int]) -> str:
    return f"{name} {list(found)} instead of {list(expected)}"


def _refuse(folder: Path, role: str, complaints: Mapping[str, Sequence[str]]) -> None:
    parts = [f"{what} {_name_some(sorted(names))}" for what, names in complaints.items() if names]
    if parts:
        raise _invalid(
            role, f"expected in {folder} exactly the tensors that its config.json describes, found {'; '.join(parts)}"
        )


def _name_some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _invalid(role: str, message: str) -> MfsError:
    if role in ("original", "base"):
        return SourceIncompatible(message, hint="pass a full safetensors checkpoint that transformers loads by itself")
    return ArtifactInvalid(message, hint="run mfs verify on the artifact")


def _align(network: torch.nn.Module) -> None:
    # Weights stored in the compute dtype stay views of the mapped file, at any address. Matrix products may round
    # differently at other alignments, and equal weights must give equal logits whatever dtype they were stored in.
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.device.type == "cpu" and tensor.data_ptr() % _ALIGNMENT:
            tensor.data = tensor.data.clone()
