"""Streaming stacked experts that are written one by one: what has to be on the disk together is a stack, no more."""

from collections import Counter

import pytest
from requant.convert import plan as plan_module
from requant.convert.initial import initial_manifest
from requant.convert.pipeline import prepare
from requant.convert.plan import CopyUnit
from requant.convert.stream import window_budget
from requant.convert.synthetic import config_of
from requant.convert.synthetic_write import write_synthetic
from requant.convert.windows import cut_windows, largest_block, shard_by_shard, shards_of, tensors_of, units_by_shard

LAYERS, EXPERTS = 6, 8


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """gpt-oss, small, with biases cut up by expert; batches of copies end in the middle of a stack."""
    monkeypatch.setattr(plan_module, "COPY_BATCH_PIECES", 5)
    config, form = config_of("gpt-oss-20b", LAYERS, None)
    config |= {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 32, "num_local_experts": EXPERTS}
    write_synthetic(tmp_path / "src", config | {"head_dim": 8}, form, seed=0, shard_size=10**9)
    (tmp_path / "m.yaml").write_text(initial_manifest(str(tmp_path / "src")))
    sets = ["target.layout=modelopt-experts", f"target.output={tmp_path}/out", "target.shard_size=100kB"]
    return prepare(str(tmp_path / "m.yaml"), sets).plan


def test_no_window_needs_more_than_two_stacks(plan):
    streamed = shard_by_shard(plan)
    sizes = Counter()
    for tensor in plan.catalogue.tensors.values():
        sizes[tensor.name.rpartition("_")[0]] += tensor.nbytes if ".experts." in tensor.name else 0
    stack = max(sizes.values())
    everything = range(len(streamed.units))
    assert len(plan.shards) > 4
    assert stack <= largest_block(streamed, everything) <= 2.2 * stack
    assert window_budget(streamed) >= largest_block(streamed, everything)
    windows = cut_windows(streamed, everything, int(2.2 * stack))
    assert len(windows) >= LAYERS
    assert [index for window in windows for index in window.units] == list(everything)


def test_a_worker_of_one_shard_does_little_that_another_does_too(plan):
    streamed = shard_by_shard(plan)
    assert sum(map(len, units_by_shard(streamed).values())) < 2 * len(streamed.units)


def test_every_piece_is_copied_once_and_a_tensor_by_one_batch_of_a_shard(plan):
    streamed = shard_by_shard(plan)
    before, after = (
        Counter(piece for unit in each.units if isinstance(unit, CopyUnit) for piece in unit.pieces)
        for each in (plan, streamed)
    )
    assert before == after
    assert sum(unit.nbytes for unit in plan.units) == sum(unit.nbytes for unit in streamed.units)
    batches = Counter()
    for unit in streamed.units:
        if isinstance(unit, CopyUnit):
            (shard,) = shards_of(streamed, unit)
            batches.update({(shard, tensor.name) for tensor in tensors_of(unit)})
    assert set(batches.values()) == {1}


def test_experts_do_not_fetch_the_biases_that_others_copy(plan):
    groups = {t.name for unit in plan.units if not isinstance(unit, CopyUnit) for t in tensors_of(unit)}
    copied = {t.name for unit in plan.units if isinstance(unit, CopyUnit) for t in tensors_of(unit)}
    biases = {name for name in plan.catalogue.tensors if name.endswith("_bias")}
    assert len(biases) == 2 * LAYERS
    assert biases <= copied
    assert groups.isdisjoint(copied)
    assert groups | copied == set(plan.catalogue.tensors)
