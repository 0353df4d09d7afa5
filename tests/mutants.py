"""Faults that tests have to find: `python -m tests.mutants [PART OF A PATH ...]` makes one after the other and says
which tests pass all the same.

A mutant is a line as it is, and as somebody could have written it. The list was made before the tests were regrouped,
so that what they guarded then is guarded still; a line that was rewritten takes its mutant with it.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: What a mutated copy of the repository needs.
COPIED = (
    "autoshard",
    "bench",
    "costmodel",
    "env",
    "policies",
    "server",
    "tests",
    "examples",
    "scripts",
    "studies",
    "pyproject.toml",
)
#: Seconds that the tests of a mutant may take; those that hang have found it.
LIMIT_S = 240.0


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        path: File.
        before: Text that is in it once.
        after: Text in its place.
        tests: Where it is found, as pytest takes it.
    """

    path: str
    before: str
    after: str
    tests: str


MUTANTS = (
    # Tables and shards.
    Mutant(
        "autoshard/core/tables.py",
        "scale_bytes = (4 if is_read_only else 8)",
        "scale_bytes = (4 if is_read_only else 4)",
        "tests/core",
    ),
    Mutant(
        "autoshard/core/optimizers.py", "Optimizer.ADAM: (_FIRST, _SECOND)", "Optimizer.ADAM: (_FIRST,)", "tests/core"
    ),
    Mutant(
        "autoshard/core/shard.py",
        "num_rows = -(-shard.num_embeddings // num_parts)",
        "num_rows = shard.num_embeddings // num_parts",
        "tests/core tests/evaluation",
    ),
    Mutant(
        "autoshard/core/shard.py",
        "share = self.num_embeddings / self.table.num_embeddings",
        "share = 1.0",
        "tests/core tests/evaluation",
    ),
    Mutant(
        "autoshard/core/shard.py",
        '_CACHE_INDEX_BYTES = {"lru": 4, "lfu": 12}',
        '_CACHE_INDEX_BYTES = {"lru": 4, "lfu": 4}',
        "tests/core tests/evaluation",
    ),
    Mutant(
        "autoshard/core/step.py",
        "top = _longest(self.top_backward + self.interaction_backward, prefetched)",
        "top = self.top_backward + self.interaction_backward",
        "tests/core tests/evaluation",
    ),
    Mutant(
        "autoshard/core/replica_groups.py",
        "if self.moment_scale > self.num_groups:",
        "if self.moment_scale > 2 * self.num_groups:",
        "tests/evaluation tests/core",
    ),
    # What a step costs.
    Mutant(
        "autoshard/evaluation/communication.py",
        "np.maximum(links.leaving_LR, links.arriving_LR)",
        "links.leaving_LR",
        "tests/evaluation",
    ),
    Mutant(
        "autoshard/evaluation/communication.py",
        "seconds_R = np.max(latency_LR, axis=0) + np.maximum(times_LR[0], beyond_R)",
        "seconds_R = np.max(latency_LR, axis=0) + times_LR[0] + beyond_R",
        "tests/evaluation",
    ),
    Mutant(
        "autoshard/evaluation/traffic.py",
        "num_lookups = profile.expected_distinct(num_lookups * num_owners) / num_owners",
        "num_lookups = profile.expected_distinct(num_lookups)",
        "tests/evaluation",
    ),
    Mutant(
        "autoshard/evaluation/stages.py",
        'counts_ms + collectives_ms("all_gather", gathered_B, comm, topology)',
        'collectives_ms("all_gather", gathered_B, comm, topology)',
        "tests/evaluation",
    ),
    Mutant("autoshard/evaluation/group_sync.py", "return ms_R / groups.sync_every", "return ms_R", "tests/evaluation"),
    Mutant(
        "autoshard/validator.py",
        "num_rows = -(-placed.shard.rows.num_rows // len(placed.replicas[0]))",
        "num_rows = placed.shard.rows.num_rows // len(placed.replicas[0])",
        "tests/evaluation tests/contracts/test_random_plans.py",
    ),
    Mutant(
        "autoshard/validator.py",
        "if placed.tier in constraints.forbidden_tiers:",
        "if False:",
        "tests/evaluation",
    ),
    Mutant("autoshard/validator.py", "if start > reached:", "if start > reached + 4:", "tests/evaluation"),
    # Planners.
    Mutant(
        "autoshard/planners/heuristics/greedy.py",
        'for item in np.argsort(-costs_N, kind="stable"):',
        'for item in np.argsort(costs_N, kind="stable"):',
        "tests/planners/test_greedy.py tests/golden",
    ),
    Mutant(
        "autoshard/planners/heuristics/karmarkar_karp.py",
        "sums_S = self.sums_S + other.sums_S[::-1]",
        "sums_S = self.sums_S + other.sums_S",
        "tests/planners/test_karmarkar_karp.py tests/golden",
    ),
    Mutant(
        "autoshard/planners/flexshard/equations.py",
        "all_reduce_cross=all_reduce / node if",
        "all_reduce_cross=all_reduce if",
        "tests/planners tests/golden -k 'flexshard or golden'",
    ),
    Mutant(
        "autoshard/core/tables.py",
        "PRICED: Final = Role.PRICE | Role.MEMORY",
        "PRICED: Final = Role.MEMORY",
        "tests/planners/test_step_cost.py tests/planners/test_sharding_options.py tests/golden",
    ),
    Mutant(
        "autoshard/planners/space/options.py",
        "split=Split.CYCLIC if len(replicas[0]) > 1 else Split.BLOCK,",
        "split=Split.BLOCK,",
        "tests/planners/test_sharding_options.py tests/golden",
    ),
    Mutant(
        "autoshard/planners/space/rows_by_price.py",
        "np.append(way_I > way, True)",
        "np.append(way_I >= way, True)",
        "tests/planners/test_hot_rows.py tests/planners/test_flexshard_rule.py",
    ),
    Mutant(
        "autoshard/planners/space/caches.py",
        "min(granted.get(index, more), more)",
        "max(granted.get(index, more), more)",
        "tests/planners/test_neo.py",
    ),
    # Files.
    Mutant(
        "autoshard/formats/documents/shards_json.py",
        "is_cyclic = shard.rows.by is RowsBy.ACCESS_RANK and len(replicas[0]) > 1",
        "is_cyclic = False",
        "tests/formats",
    ),
    Mutant("autoshard/formats/documents/json_document.py", "if repeated:", "if False:", "tests/formats"),
    Mutant(
        "autoshard/formats/documents/kinds.py",
        "is_optional = one.default is not MISSING and one.meaning.written is not Written.REQUIRED",
        "is_optional = one.default is not MISSING",
        "tests/formats",
    ),
    Mutant(
        "autoshard/formats/imports/table_lists.py",
        "known, scale = _field_of(label)",
        "known, scale = _field_of(label)[0], 1",
        "tests/formats/test_table_lists.py",
    ),
    Mutant(
        "autoshard/formats/files.py",
        "temporary.replace(target)",
        "target.write_bytes(temporary.read_bytes())",
        "tests/formats/test_atomic_write.py",
    ),
    # Execution.
    Mutant(
        "autoshard/runtime/engine/ids/addresses.py",
        "return torch.where(ids_L < self.num_ordered, low_L, high_L)",
        "return torch.where(ids_L <= self.num_ordered, low_L, high_L)",
        "tests/runtime tests/contracts/test_executed_layouts.py -k 'order or random or address or fake'",
    ),
    Mutant(
        "autoshard/runtime/engine/vectors/payload.py",
        "return values.view(-1)[:num_values]",
        "return values.view(-1)[-num_values:]",
        "tests/runtime/test_payload.py",
    ),
    Mutant(
        "autoshard/runtime/engine/rows/torch_rows.py",
        "return squares_UD.mean(dim=1) if",
        "return squares_UD.sum(dim=1) if",
        "tests/contracts/test_executed_layouts.py tests/contracts/test_runtime.py",
    ),
    Mutant(
        "autoshard/runtime/engine/rows/averaging.py",
        "dist.all_reduce(union, op=dist.ReduceOp.MAX, group=peers)",
        "dist.all_reduce(union, op=dist.ReduceOp.MIN, group=peers)",
        "tests/runtime/test_state.py",
    ),
    Mutant(
        "autoshard/runtime/engine/holdings.py",
        "return max(0, -(-(self.num_rows - part) // self.num_parts))",
        "return max(0, (self.num_rows - part) // self.num_parts)",
        "tests/runtime/test_ownership.py tests/contracts/test_executed_layouts.py",
    ),
    # Learned costs and policies.
    Mutant(
        "costmodel/kernel/features.py",
        "distinct_N * (1 - hit_share_N),",
        "distinct_N,",
        "tests/costmodel/test_cost_features.py",
    ),
    Mutant(
        "costmodel/registry/promotion.py",
        "return not self.difference <= self.tolerance",
        "return not self.difference <= 10 * self.tolerance",
        "tests/costmodel/test_promotion.py",
    ),
    Mutant(
        "costmodel/kernel/loss.py",
        "own_N >= costliest_B[owner_N]",
        "own_N > costliest_B[owner_N]",
        "tests/costmodel/test_loss.py",
    ),
    Mutant(
        "env/game.py",
        "rewards_E=task.witness_ms / step_ms_E",
        "rewards_E=step_ms_E / task.witness_ms",
        "tests/env",
    ),
    Mutant(
        "policies/training/returns.py",
        "advantages_TB = rhos_TB * (rewards_TB + discounts_TB * next_targets_TB - values_TB)",
        "advantages_TB = rhos_TB * (rewards_TB + discounts_TB * next_values_TB - values_TB)",
        "tests/policies/test_returns.py",
    ),
    # Measuring.
    Mutant("bench/kernels/measurable.py", "if shard.embedding_dim % 4:", "if shard.embedding_dim % 2:", "tests/bench"),
    # The service.
    Mutant(
        "server/web/rate_limit.py",
        "wait_s = math.ceil((1 - bucket.tokens) / self._rate)",
        "wait_s = math.floor((1 - bucket.tokens) / self._rate)",
        "tests/server/test_metrics.py",
    ),
    Mutant(
        "server/storage/idempotency.py",
        "if found.fingerprint != request.fingerprint:",
        "if False:",
        "tests/server/test_plans.py tests/server/test_storage.py",
    ),
    Mutant(
        "server/storage/idempotency.py",
        "if found.status is None:",
        "if False:",
        "tests/server/test_plans.py tests/server/test_storage.py",
    ),
    Mutant("server/web/access.py", "and not actor.may(door)", "and False", "tests/server/test_keys.py"),
)


def main(parts: list[str]) -> int:
    """Makes the mutants whose path holds any of the parts; the number of those that no test finds."""
    chosen = [one for one in MUTANTS if not parts or any(part in one.path for part in parts)]
    alive = []
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copy2
            copy(source, Path(folder) / name)
        for number, mutant in enumerate(chosen, 1):
            started = time.monotonic()
            is_found = _is_found(mutant, Path(folder))
            alive += [] if is_found else [mutant]
            took = time.monotonic() - started
            print(
                f"{number}/{len(chosen)} {'found' if is_found else 'ALIVE'} {took:.0f} s {mutant.path}: {mutant.after}",
                flush=True,
            )
    print(f"{len(chosen) - len(alive)} of {len(chosen)} found")
    return len(alive)


def _is_found(mutant: Mutant, folder: Path) -> bool:
    file = folder / mutant.path
    text = file.read_text(encoding="utf-8")
    if text.count(mutant.before) != 1:
        raise SystemExit(f"{mutant.path} has {text.count(mutant.before)} times: {mutant.before}")
    file.write_text(text.replace(mutant.before, mutant.after), encoding="utf-8")
    command = f"{sys.executable} -m pytest -q -x -p no:cacheprovider -n 0 {mutant.tests}"
    try:
        ran = subprocess.run(
            command, shell=True, cwd=folder, timeout=LIMIT_S, capture_output=True, check=False,
            env={**os.environ, "PYTHONPATH": str(folder)},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return True
    finally:
        file.write_text(text, encoding="utf-8")
    if ran.returncode not in (0, 1):
        raise SystemExit(f"no test was run: {command}\n{ran.stdout.decode()[-2000:]}")
    return ran.returncode == 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
