"""The tables of likelihoods, of the latent code and of generated text, with the paper's numbers beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pretrain.latent.report.published import GENERATED
from pretrain.latent.report.rows import ModelRow
from pretrain.report.document import Table

BOUND_REMARK = (
    "-ELBO and PPL 'dual' are the paper's columns: reconstruction plus the Fenchel dual of the KL. The dual is a lower "
    "bound on the KL for any critic, so this sum is below -ELBO, and it bounds -log p(x) on no side. All other "
    "perplexities are upper bounds (the language model's is exact). 'Exact KL' and 'q' measure how well the encoder's "
    "Gaussian fits the decoder, not the model: where it fits badly they are loose by orders of magnitude. A comparison "
    "of models takes 'best', the tightest bound for the text as a whole, and even that is an upper bound. ± is the "
    "standard error over sentences (delta method); two models on the same sentences differ by less. "
    "Rows that say 'validation' wait for capt evaluate RUN."
)
CODE_REMARK = (
    "MI batch is at most the log of the batch, MI aggregate at most the log of the sentences it is over. AU counts the "
    "dimensions whose exact posterior mean varies by more than 0.01; 'sampled' is the released rule, which also counts "
    "collapsed dimensions of a wide posterior."
)


def likelihood_table(rows: Sequence[ModelRow]) -> Table:
    """Write -ELBO and PPL of Tables 1 to 3 and 7: as published, by the dual as in the paper, by the tightest bound."""
    header = ["model", "epochs", "measured on", "-ELBO published", "PPL published", "-ELBO dual", "PPL dual",
              "reconstruction", "-log p(x), best bound", "PPL, best bound", "by, of sentences"]  # fmt: skip
    cells = []
    for row in rows:
        nelbo, ppl = row.published[:2] if row.published else (None, None)
        best = row.estimate("ppl_best") or {}
        cells.append(
            [row.label, _epochs(row), row.measured, _format(nelbo, 1), _format(ppl, 2),
             _format(row.get("nelbo_dual"), 1), _format(row.get("ppl_dual"), 1), _format(row.get("rec"), 1),
             _format(best.get("nats"), 1), _estimate(row, "ppl_best"), _proposal(best)]
        )  # fmt: skip
    return _filled(header, cells)


def bounds_table(rows: Sequence[ModelRow]) -> Table:
    """Write the perplexity by every valid bound, with its standard error, draws and sentences, and the bridge."""
    header = ["model", "PPL, exact KL", "the same, weighted sentences",
              *(f"PPL, {name}" for name in _WEIGHTED.values()), "draws",
              "sentences", "bridge: sentences, PPL", "best bound there", "best minus bridge, nats"]  # fmt: skip
    cells = []
    for row in rows:
        weighted = [found for name in _WEIGHTED if (found := row.estimate(name)) is not None]
        bridge = row.estimate("bridge") or {}
        bridged = f"{bridge['sentences']:,}, {_estimate(row, 'bridge')}" if bridge else ""
        gap, error = (bridge.get(f"tightest_minus_bridge{end}") for end in ("", "_standard_error"))
        exact = _estimate(row, "ppl_exact") or _format(row.get("ppl_exact"), 1)
        cells.append(
            [row.label, exact, _estimate(row, "ppl_exact_there"), *(_estimate(row, name) for name in _WEIGHTED),
             "; ".join(dict.fromkeys(f"{found['draws']:,}" for found in weighted)),
             "; ".join(dict.fromkeys(f"{found['sentences']:,}" for found in weighted)),
             bridged, _format(bridge.get("ppl_best_there"), 1), _format(gap, 2) + (f" ± {error:.2f}" if error else "")]
        )  # fmt: skip
    return _filled(header, cells)


_WEIGHTED = {"ppl_iw_q": "q", "ppl_iw_prior": "prior", "ppl_iw_mixture": "q and prior", "ppl_iw_refitted": "refitted"}
"""The importance-weighted perplexities, and what proposes."""


def _proposal(best: Mapping[str, Any]) -> str:
    name = best.get("proposal")
    if name is None:
        return ""
    proposal = "exact KL" if name == "exact" else _WEIGHTED[f"ppl_iw_{name}"]
    return f"{proposal}, {best['sentences']:,}"


def _estimate(row: ModelRow, name: str) -> str:
    found = row.estimate(name)
    if found is None:
        return ""
    error = found.get("standard_error")
    return f"{found['value']:,.1f}" + ("" if error is None else f" ± {error:,.1f}")


def code_table(rows: Sequence[ModelRow]) -> Table:
    """Write KL, MI and AU of Tables 1 to 3 and 7."""
    header = ["model", "KL published", "MI published", "AU published", "KL dual", "KL exact", "MI dual", "MI batch",
              "MI aggregate", "AU", "AU sampled"]  # fmt: skip
    cells = []
    for row in rows:
        kl, mi, au = row.published[2:] if row.published else (None, None, None)
        cells.append(
            [row.label, _format(kl, 2), _format(mi, 2), _format(au, 0), _format(row.get("kl_dual"), 2),
             _format(row.get("kl_exact"), 2), _format(row.get("mi_dual"), 2), _format(row.get("mi_batch"), 2),
             _format(row.get("mi_aggregate"), 2), _format(row.get("au"), 0), _format(row.get("au_sampled"), 0)]
        )  # fmt: skip
    return _filled(header, cells)


def generated_table(rows: Sequence[ModelRow]) -> Table:
    """Write forward and reverse perplexity of sampled sentences (Table 4), for the rows where they were measured."""
    header = ["model", "forward published", "reverse published", "forward", "reverse (training text)",
              "reverse (test text)", "sentences, by"]  # fmt: skip
    cells = []
    for row in rows:
        if not row.generated:
            continue
        forward, reverse = GENERATED.get(row.name, (None, None)) if row.text == "ptb" else (None, None)
        names = ("forward_ppl", "reverse_train_ppl", "reverse_test_ppl")
        cells.append([row.label, _format(forward, 0), _format(reverse, 0),
                      *(_format(row.generated.get(name), 0) for name in names),
                      f"{row.generated.get('number', 0):,}, {row.generated.get('by', '')}"])  # fmt: skip
    return _filled(header, cells)


def _filled(header: Sequence[str], cells: Sequence[Sequence[str]]) -> Table:
    """The table without the columns in which no row has anything, as the published ones of other text."""
    kept = [i for i in range(len(header)) if i == 0 or any(row[i] for row in cells)]
    return Table([header[i] for i in kept], [[row[i] for i in kept] for row in cells])


def _epochs(row: ModelRow) -> str:
    epochs = row.run.config.get("schedule.epochs")
    return "" if epochs is None else f"{epochs:g}"


def _format(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"
