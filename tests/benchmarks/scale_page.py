"""The page of `bench_scale`: its tables, and around them what is predicted, assumed, and would refute it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from capt.pretrain.plan.devices import CENTRAL, FAST, SLOW
from capt.pretrain.plan.predict import collective_seconds
from tests.benchmarks.scale_tables import FULL, GLOBAL, OTHERS, QUEUES, WORLDS, Prediction, Scenario, shipped_rows
from tests.benchmarks.scale_time import CHEAP, CONSTANTS, DEAR, H100

_READ = f"""One rank of W runs `capt_large` (d = 1,024 features, sequences of 512, fp32 contrast, ZeRO 1, and the
guard of its queue) with {GLOBAL:,} samples of all ranks a step, so {2 * GLOBAL:,} anchors, unless a row says otherwise.
From here on its layers are not compiled and no graph of a micro-batch is kept (`model.compile=false contrast.keep=0`),
so that a step takes longer than one of the shipped job above, and a queue is a smaller share of it than there. A rank
that has fewer samples than `batch.micro` takes them in one pass, without a second one for the contrast. *Simulated*
means: our own code ran as that rank, on tensors that have a size and no data, in a process group that answers at once.
*Predicted* means: a formula over these counts, published constants, and rates of one H200. **Nothing was measured on
several GPUs.**"""

_SHIPPED = """What `capt plan capt_large --gpus 8xh100` (64, 128, 1,024) predicts of the job as it is shipped, and
with micro-batches of 64. At 1,024 GPUs a rank has 8 samples, and takes them in one pass. In brackets: every
assumption set against the job, and for it. The rates are of [twelve steps on one H200](gpu.md); **nothing was measured
on several GPUs.**

An MFU of 35% on 8 to 128 GPUs and of 20% on 1,024 was aimed at: **missed** at each number by the central prediction. Of
the job that was shipped until 2026-11-25, with recomputation and without compilation, the column was 20.2, 20.0, 19.6
and 14.1%, by assumptions that one H200 has shown to be too fast since; by the same assumptions the present job had
34.3, 37.9, 42.4 and 18.8% (predicted once, on 2026-11-26; the rates have changed since)."""

_CONTRAST = """`MB received`: of all collectives of the contrast, in a step. `peak above`: the largest memory above
queue and representations. `operations`: of the matrix products. `operators`: about the kernels that are started."""

_MEMORY = """In GB. Weights, gradients, both Adam moments and the copy of the weights that a rank updates are a formula
(fp32, ZeRO 1). Activations: the simulated peak of a whole step above weights and gradients, without queue; contrast:
its peak, which comes when no activation is held. *At most* adds the larger of the two. What the allocator loses to
fragments, the engine's buckets of gradients, and NCCL's own buffers are not in it."""

_TIME = """`arithmetic` and `wire` are the contrast's. In brackets the share of the contrast in the step with every
assumption set against and for it; in those of `MFU` the utilisation with every assumption set against the step, and
for it. MFU counts what the model needs
(`capt.pretrain.models.architecture.flops_per_token`), neither recomputed layers nor the first passes of a cached
contrast."""

_PROOF = """Real gloo ranks run the same step with random rows, in blocks of a GPU's size, and are measured by the
same instruments. Every collective with its bytes, the peak and the operations of every rank must be those of the
simulated rank, to the byte, and the collectives those of the [closed form](../contrast.md).
`tests/unit/contrast/test_scale.py` holds it to that, with drift and without caching too. What this cannot prove:
NCCL's buffers, the allocator, and every time."""

_LIMITS = """- The anchors of *all* ranks, their sums, and the copy in which these are sent lie on every rank: about
  12 N' d bytes for N' anchors of all ranks. That does not grow with K, nor with W at a fixed global batch. It does
  grow with the global batch: the last row of the first table, 131,072 samples a step, holds {weak:.1f} GB of them.
  `contrast.in_batch=local` does not help, for the queue needs all anchors.
- `contrast.drift` corrects a copy of the rank's queue in every step. It was three copies at the peak when this was
  first simulated; it is one now ({drift:.1f} GB above the row of the paper's queue, which has no drift).
- A ring over W ranks takes W - 1 steps. At 1,024 ranks the {collectives} collectives of the contrast are latency,
  not bytes. `contrast.drift` adds two all-reduces of 16 KB, one for the loss and one for the push, though both are of
  the same rows, and `contrast.queue_share` one of 8 bytes; by this model of a ring the three take {reduces:.1f} ms
  there, in a tree far less.
- Without `contrast.cached` a step sends as many bytes in as many times more collectives as it has micro-batches.
- A queue that was saved by *another* number of ranks is read once, each file by one rank, but all its rows pass every
  rank on their way to those that keep them: 69 GB with 16,777,216 rows.
- A permanent checkpoint has three files a rank, 3,072 at 1,024 ranks, in one folder. A local one keeps on each
  host the files of its ranks and of those of the host before, but a restart from it gives every host all files:
  {all_files:.0f} GB a host with 16,777,216 rows, {few_files:.0f} GB with 65,536.
- No object a rank, no dictionary of rows and no gather grows with K or with W K: between K = 0 and K = 16,777,216
  nothing changes but the rows held (K / W) and the products with them."""

_REFUTE = """1. **Bytes.** `Wire` of `capt.pretrain.plan.simulated` around a step on NCCL ranks: any collective of the
   contrast of other bytes than in `tests/benchmarks/scale_forms.py`, or one more that depends on K.
2. **Memory.** `torch.cuda.max_memory_allocated()` of a run with K rows minus that of a run with fewer: more than 1.1
   times the difference of the column `queue` (as long as activations, not the contrast, set the peak).
3. **Time.** `seconds_per_step` in `metrics.jsonl`, once the queue is full (K / {rows:,} steps), against the same job
   with `contrast.queue=0`: the step is longer by a share outside of the brackets above. Then `capt bench gpu` says
   which constant or assumption was wrong: rates of the products in every precision; nccl-tests (`all_gather_perf`,
   `reduce_scatter_perf`) at the sizes of the first table says it of the wire.

```sh
capt pretrain capt_large data.files='[text/*.txt.gz]' run.dir=runs/queue contrast.queue=1048576 \\
    schedule.max_steps=200 schedule.warmup_steps=100
capt pretrain capt_large data.files='[text/*.txt.gz]' run.dir=runs/none contrast.queue=0 \\
    schedule.max_steps=200 schedule.warmup_steps=100
```

To predict other sizes: `Scenario(world, samples, queue, options)` in `tests/benchmarks/scale_tables.py`, and `capt
bench scale --out docs/benchmarks`."""


ABOUT = {
    "products": "share of the peak that matrix products reach",
    "memory": "share of the memory's bandwidth that the operators between the products, and the update, reach",
    "launch": "seconds in which the host starts an operator; hosts run ahead, so the larger of this and of the time of "
    "the device counts",
    "fused_bytes": "share of the bytes between products that is left with model.compile",
    "fused_operators": "share of the operators that is left with model.compile",
    "links": "share of a link's peak that a ring reaches",
    "rails": "whether a ring between hosts uses all network cards of a host; else one card",
    "zero_hidden": "share of ZeRO's reduction of gradients that is hidden behind the backward pass",
}
"""Meanings of the `Assumptions`."""


def page(found: Prediction, proven: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The sections of the page."""
    scenarios = [*FULL, *OTHERS]
    contrasts, times = ([row(each) for each in scenarios] for row in (found.contrast_row, found.time_row))
    largest = [each for each in FULL if each.queue == QUEUES[-1]]
    plain = next(each for each in OTHERS if "contrast.drift=none" in each.options)
    work = {each: found.found[each].peak - found.found[each].before for each in scenarios}
    limits = _LIMITS.format(
        weak=work[OTHERS[-1]] / 1e9,
        drift=(work[largest[0]] - work[plain]) / 1e9,
        collectives=len(found.found[largest[-1]].sent),
        reduces=sum(
            1e3 * collective_seconds("allreduce_", size, WORLDS[-1], CENTRAL, H100) for size in (16_392, 16_392, 8)
        ),
        all_files=_checkpoint(found, QUEUES[-1]) / 1e9,
        few_files=_checkpoint(found, QUEUES[1]) / 1e9,
    )
    return [
        {"title": "The shipped job", "text": _SHIPPED, "rows": shipped_rows()},
        {"title": "Prediction", "text": f"{_READ}\n\n{_predictions(found, largest)}"},
        {"title": "The contrast of one rank, simulated", "text": _CONTRAST, "rows": contrasts},
        {"title": "Memory of one rank", "text": _MEMORY, "rows": list(map(found.memory_row, (*largest, *OTHERS)))},
        {"title": "Time of a step, predicted", "text": _TIME, "rows": times},
        {"title": "What does not scale", "text": limits},
        {"title": "Proof", "text": _PROOF, "rows": proven},
        {"title": "Constants", "rows": _constants()},
        {"title": "Assumptions", "text": _assumed(), "rows": _assumptions()},
        {"title": "What would refute it", "text": _REFUTE.replace("{rows:,}", f"{2 * GLOBAL:,}")},
    ]  # fmt: skip


def _predictions(found: Prediction, largest: list[Scenario]) -> str:
    lines = [
        f"- A step sends the same bytes for the contrast whatever K: {_received(found)}.",
        *(f"- At W = {each.world:,} a queue of {each.queue:,} rows makes the step longer by {_longer(found, each)} "
          f"than none, and costs the rank {found.found[each].queue / 1e9:.2f} GB." for each in largest),
        *(f"- At W = {each.world}, K = {each.queue:,} with `{' '.join(each.options)}` by {_longer(found, each)}."
          for each in OTHERS if any("precision" in option for option in each.options)),
        f"- A queue of {QUEUES[1]:,} rows makes the step longer by " + ", ".join(
            f"{_longer(found, each)} at W = {each.world:,}" for each in FULL if each.queue == QUEUES[1]) + ".",
    ]  # fmt: skip
    return "\n".join(lines)


def _received(found: Prediction) -> str:
    parts = []
    for world in WORLDS:
        (received,) = {
            each.received for of, each in found.found.items() if of in FULL and of.world == world and of.queue
        }
        parts.append(f"{received / 1e6:.1f} MB at W = {world:,}")
    return ", ".join(parts)


def _checkpoint(found: Prediction, queue: int) -> int:
    """Bytes of all files: weights, both moments, and the rows and ids of the queue in fp32."""
    weights = found.encoder(FULL[0]).weights
    return 12 * weights + sum(found.found[each].queue * each.world for each in FULL if each.queue == queue) // len(
        WORLDS
    )


def _longer(found: Prediction, of: Scenario) -> str:
    low, high = sorted(found.longer(of, given) for given in (CHEAP, DEAR))
    return f"{found.longer(of):.1%} ({low:.1%} to {high:.1%})"


def _constants() -> list[dict[str, Any]]:
    return [{"constant": name, "value": f"{each.value:g} {each.unit}".strip(), "source": each.source}
            for name, each in CONSTANTS.items()]  # fmt: skip


def _assumed() -> str:
    return (
        "Besides: collectives go one after the other and over a ring, the faster of NCCL's protocols LL and Simple (no "
        "NVLS, no PAT, no SHARP, no trees, which would be faster); no rank waits for a slower one; data are always "
        "ready; products reach as much of the peak with 8 samples as with 16; gradients and weights travel in fp32, "
        "once a step, gradients all-reduced in buckets of 25 million as DeepSpeed does (so that at 1,024 ranks ZeRO is "
        "latency as well); the queue is full; every operator reads and writes main memory, none is fused without "
        "model.compile; hosts have 8 GPUs, and ranks follow one another on a host. *Slow* and *fast* set every "
        "assumption so that a step takes longer, or less time; the share of the contrast is bracketed by a fast "
        "encoder with a slow contrast, and by the opposite."
    )


def _assumptions() -> list[dict[str, Any]]:
    central, slow, fast = (asdict(each) for each in (CENTRAL, SLOW, FAST))
    return [{"assumption": name, "central": str(central[name]), "slow": str(slow[name]), "fast": str(fast[name]),
             "what it is": about} for name, about in ABOUT.items()]  # fmt: skip
