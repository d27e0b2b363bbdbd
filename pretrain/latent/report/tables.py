"""The tables of likelihoods, of the latent code and of generated text, with the paper's numbers beside ours."""

from __future__ import annotations

from collections.abc import Sequence

from pretrain.latent.report.published import GENERATED
from pretrain.latent.report.rows import ModelRow
from pretrain.report.document import Table

BOUND_REMARK = (
    "-ELBO and PPL 'dual' are the paper's columns: reconstruction plus the Fenchel dual of the KL. The dual is a lower "
    "bound on the KL for any critic, so this sum is below -ELBO, and it bounds -log p(x) on no side. 'Exact' has the "
    "exact KL: an upper bound on -log p(x), hence on the perplexity. IW is the importance-weighted likelihood, also "
    "an upper bound, and tighter on the same sentences. Only 'exact' and IW tell which model fits the text better. "
    "Rows that say 'validation' wait for capt evaluate RUN."
)
CODE_REMARK = (
    "MI batch is at most the log of the batch, MI aggregate at most the log of the sentences it is over. AU counts the "
    "dimensions whose exact posterior mean varies by more than 0.01; 'sampled' is the released rule, which also counts "
    "collapsed dimensions of a wide posterior."
)


def likelihood_table(rows: Sequence[ModelRow]) -> Table:
    """Write -ELBO and PPL of Tables 1 to 3 and 7: as published, by the dual as in the paper, and by valid bounds."""
    header = ["model", "epochs", "measured on", "-ELBO published", "PPL published", "-ELBO dual", "PPL dual",
              "reconstruction", "-ELBO exact", "PPL exact", "PPL IW",
              "IW: draws, sentences", "PPL exact of these"]  # fmt: skip
    cells = []
    for row in rows:
        nelbo, ppl = row.published[:2] if row.published else (None, None)
        has_no_kl = row.name in ("AE", "LSTM language model")  # the language model's PPL is exact, AE has none
        exact = row.get("ppl_rec") if row.name == "LSTM language model" else row.get("ppl_exact")
        weighted, draws = row.weighted or (None, None)
        sentences = row.get("iw_sentences") or row.get("sentences")
        cells.append(
            [row.label, _epochs(row), row.measured, _format(nelbo, 1), _format(ppl, 2),
             _format(row.get("nelbo_dual"), 1), _format(row.get("ppl_dual"), 1), _format(row.get("rec"), 1),
             "" if has_no_kl else _format(row.get("nelbo_exact"), 1), _format(exact, 1), _format(weighted, 1),
             f"{draws:,}, {sentences:,.0f}" if draws else "", _format(row.get("ppl_exact_there"), 1)]
        )  # fmt: skip
    return Table(header, cells)


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
    return Table(header, cells)


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
    return Table(header, cells)


def _epochs(row: ModelRow) -> str:
    epochs = row.run.config.get("schedule.epochs")
    return "" if epochs is None else f"{epochs:g}"


def _format(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"
