"""Bytes of every region of every blob changed, with every digest right again."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest
from attack_artifacts import Target
from attack_reading import limits, read_tensor
from every_codec import ADAPTERS

from mfs_decompose.artifact.verify import verify

Attacked = Callable[[str], Target]

_BYTES = (0, 1, 127, 128, 255)


def spoiled(data: bytes, region: int, regions: int, dice: random.Random) -> bytes:
    """Some bytes of one of so many regions set to another value, or one bit of them flipped."""
    at = min(len(data) - 1, (len(data) * region + dice.randrange(len(data))) // regions)
    changed = bytearray(data)
    for place in range(at, min(len(data), at + dice.choice((1, 1, 2, 4, 8)))):
        flipped = changed[place] ^ (1 << dice.randrange(8))
        changed[place] = dice.choice((*_BYTES, flipped, flipped))
    return bytes(changed)


def attack(target: Target, regions: int, seed: int) -> dict[str, int]:
    """Read every tensor with every region of its bytes spoiled in turn: how often what came of it."""
    dice, found = random.Random(seed), {"refused": 0, "mismatch": 0, "same": 0}
    for name in target.tensors:
        for region in range(regions if name in target.blobs else 0):
            one = target.fresh()
            one.blobs[name] = spoiled(one.blobs[name], region, regions, dice)
            one.seal()
            with limits():
                found[read_tensor(one.folder, "many", name, one.tensors[name]["restored_sha256"])] += 1
    return found


@pytest.mark.parametrize("artifact", ["lossy", "exact"])
def test_spoiled_bytes_are_refused_or_found_by_their_digest(artifact: str, attacked: Attacked) -> None:
    found = attack(attacked(artifact), 6, 1)
    assert found["mismatch"] > found["refused"] > 0  # most codecs can decode any bytes
    assert found["same"] < 0.1 * sum(found.values())  # padding bits, and bits written over by themselves


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("artifact", ["lossy", "exact"])
def test_many_spoiled_bytes(artifact: str, seed: int, attacked: Attacked) -> None:
    attack(attacked(artifact), 40, 100 + seed)


@pytest.mark.parametrize("artifact", ["lossy", "exact"])
def test_blobs_cut_and_grown(artifact: str, attacked: Attacked) -> None:
    target = attacked(artifact)
    for name in target.blobs:
        for data in (target.blobs[name][:-1], target.blobs[name] + b"\0"):
            one = target.fresh()
            one.blobs[name] = data
            one.seal()
            with limits():
                assert read_tensor(one.folder, "many", name, "") == "refused"


def test_noise_in_place_of_a_blob(attacked: Attacked) -> None:
    for artifact in ("lossy", "exact"):
        target, dice = attacked(artifact), random.Random(5)
        for name, data in target.blobs.items():
            for noise in (dice.randbytes(len(data)), bytes(len(data)), b"\xff" * len(data)):
                one = target.fresh()
                one.blobs[name] = noise
                one.seal()
                with limits():
                    assert read_tensor(one.folder, "many", name, "") in ("refused", "mismatch")


@pytest.mark.parametrize("artifact", ADAPTERS)
def test_spoiled_adapters_are_found_by_the_digest_of_what_they_make(artifact: str, attacked: Attacked) -> None:
    target, dice = attacked(artifact), random.Random(3)
    for name in list(target.blobs)[::2]:
        users = {tensor for tensor, record in target.tensors.items() if f'"{name}"' in json.dumps(record["tree"])}
        one = target.fresh()
        one.blobs[name] = dice.randbytes(len(one.blobs[name]))
        one.seal()
        for tensor in users:
            with limits():
                assert read_tensor(one.folder, "many", tensor, one.tensors[tensor]["restored_sha256"]) != "same"
    target.seal()
    assert verify(target.folder, "values").ok


def test_verify_reports_what_was_spoiled(attacked: Attacked) -> None:
    for artifact in ("lossy", "exact", "linear"):
        target, dice = attacked(artifact), random.Random(9)
        for name in list(target.blobs)[::5]:
            one = target.fresh()
            one.blobs[name] = dice.randbytes(len(one.blobs[name]))
            one.seal()
            assert verify(one.folder, "checksums").ok
            with limits():
                report = verify(one.folder, "values")
            assert not report.ok
            assert not any("Error" in problem.what for problem in report.problems), report.problems
            assert all("'many'" in problem.what for problem in report.problems)
