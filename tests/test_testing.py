"""The fault injector: what it says is caught is caught, and what it says is invisible is invisible."""

from __future__ import annotations

import numpy as np
import pytest

from r3 import Routes, RoutingSpec
from r3.errors import WireError
from r3.metrics import RouteMismatch
from r3.testing import FAULTS, cut, encode_sglang, encode_vllm, random_rows, stale_rows
from r3.wire import decode, examine
from r3.wire.checks import CHECKS
from r3.wire.engines import known_defects

SPEC = RoutingSpec(num_layers=6, moe_layers=(2, 3, 4, 5), num_experts=256, top_k=8)
WIDE = RoutingSpec(num_layers=6, moe_layers=(2, 3, 4, 5), num_experts=512, top_k=8)  # more experts than a byte counts
TOKENS = 2049  # long enough for the statistics of `coverage`

CAUGHT = [name for name, fault in FAULTS.items() if fault.caught_by]
INVISIBLE = [name for name, fault in FAULTS.items() if not fault.caught_by]


def good_and_broken(name: str, spec: RoutingSpec = SPEC) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    rows = random_rows(rng, spec, TOKENS - 1, hidden=True)
    before = rows.copy()
    broken = FAULTS[name].inject(rows, spec, rng)
    assert np.array_equal(rows, before), "a fault must not write into what it was given"
    assert broken.shape != rows.shape or not np.array_equal(broken, rows), "a fault must do something"
    return rows, broken


@pytest.mark.parametrize("name", CAUGHT)
def test_a_fault_that_shows_is_refused_by_the_check_it_names(name: str) -> None:
    spec = WIDE if name == "overflow_uint8" else SPEC
    _, broken = good_and_broken(name, spec)
    for encode in (encode_vllm, encode_sglang):
        payload = (
            encode(broken) if encode is encode_sglang or broken.dtype != np.int64 else encode(broken.astype("<i4"))
        )
        refused = examine(payload, spec, num_tokens=TOKENS).refused
        assert refused is not None
        assert refused.check in FAULTS[name].caught_by
        assert refused.cause, "a refusal says what probably happened"


@pytest.mark.parametrize("name", INVISIBLE)
def test_a_fault_that_does_not_show_passes_every_check(name: str) -> None:
    """So that nobody takes a decoded payload for a proved one."""
    _, broken = good_and_broken(name)
    done = examine(encode_sglang(broken), SPEC, num_tokens=TOKENS)
    assert done.findings == ()
    assert done.unwrap().num_recorded == TOKENS - 1


@pytest.mark.parametrize("name", INVISIBLE)
def test_a_fault_that_does_not_show_is_found_by_agreement(name: str) -> None:
    """The trainer's own top-k stands for the truth: it agrees with a right record, and by chance with a wrong one."""
    rows, broken = good_and_broken(name)
    own = decode(encode_sglang(rows), SPEC, num_tokens=TOKENS)
    record = decode(encode_sglang(broken), SPEC, num_tokens=TOKENS)
    agreement = overlap(own, record)
    chance = SPEC.top_k / SPEC.num_experts
    wrong = {"swap_layers": [0, 3], "overwrite_layer": [0]}.get(name, [0, 1, 2, 3])
    for layer in range(SPEC.num_moe_layers):
        if layer in wrong:
            assert agreement[layer] < 2 * chance
        else:
            assert agreement[layer] == 1.0
    assert "agreement" in FAULTS[name].later


def overlap(a: Routes, b: Routes) -> np.ndarray:
    mismatch = RouteMismatch(SPEC.num_moe_layers)
    both = a.recorded & b.recorded
    mismatch.add(a.ids[:, both].astype(np.int64), b.ids[:, both].astype(np.int64))
    return mismatch.overlap / mismatch.rows


@pytest.mark.parametrize(
    ("name", "engine", "version"),
    [("overwrite_layer", "vllm", "0.25.1"), ("physical_permutation", "sglang", "0.5.9")],
)
def test_the_version_table_knows_who_makes_faults_that_do_not_show(name: str, engine: str, version: str) -> None:
    assert "version" in FAULTS[name].later
    said = " ".join(defect.what for defect in known_defects(engine, version) if defect.action == "warn")
    assert {"overwrite_layer": "layer 0", "physical_permutation": "physical"}[name] in said


def test_the_checks_that_faults_name_exist() -> None:
    names = {name for name, _, where in CHECKS.values() if where == "payload"}
    assert {check for fault in FAULTS.values() for check in fault.caught_by} <= names
    assert all(fault.caught_by or fault.later for fault in FAULTS.values())


def test_stale_rows_of_another_length_show() -> None:
    rng = np.random.default_rng(0)
    rows, other = (random_rows(rng, SPEC, n, hidden=True) for n in (20, 15))
    with pytest.raises(WireError, match="rows do not fit the tokens"):
        decode(encode_vllm(stale_rows(rows, other)), SPEC, num_tokens=21)


@pytest.mark.parametrize("encode", [encode_vllm, encode_sglang])
@pytest.mark.parametrize("characters", [1, 4, 64])
def test_a_payload_that_lost_its_end_is_refused(encode, characters: int) -> None:
    rows = random_rows(np.random.default_rng(0), SPEC, 5, hidden=True)
    with pytest.raises(WireError):
        decode(cut(encode(rows), characters), SPEC, num_tokens=6)
